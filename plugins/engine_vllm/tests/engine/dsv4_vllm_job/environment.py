"""What vLLM 0.32's CPU build lacks for DeepSeek-V4, put right in every process of the job."""

from __future__ import annotations

import os


def register() -> None:
    """vLLM's entry point."""
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as Builder

    from dsv4_vllm_job import standins

    # Its own version lacks the keys of V4.1's layers: KeyError: 'c1a'.
    kinds = ("swaonly", "c4a", "c128a", "c1a", "c2a")
    Builder.build_tile_scheduler = lambda self, tokens: dict.fromkeys(kinds)
    standins.install()
    if os.environ.get("DSV4_JOB_SHADOW"):
        from dsv4_vllm_job import shadow

        shadow.install(os.environ["DSV4_JOB_SHADOW"])
    if os.environ.get("DSV4_JOB_RECORD"):
        from dsv4_vllm_job import record

        record.install(os.environ["DSV4_JOB_RECORD"])
    if os.environ.get("DSV4_JOB_UNEVEN") or os.environ.get("DSV4_JOB_LONE"):
        from dsv4_vllm_job import uneven

        uneven.install(os.environ.get("DSV4_JOB_UNEVEN", ""), os.environ.get("DSV4_JOB_LONE", ""))
