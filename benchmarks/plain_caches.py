"""What `backend=flashinfer` takes beside FlashInfer's kernel itself, and layers beside `backend=triton`'s.

    python benchmarks/plain_caches.py benchmarks/results/h200/plain_caches.jsonl [commit]

needs FlashInfer with `[cute]`, and DeepGEMM for the output projection.
"""

from __future__ import annotations

import sys

from dsv4core.cli.main import main

COMMON = ("bench", "model=v4_flash", "bench.context=[65536]")
DECODE = "bench.phase=[decode]"
SETS = (
    (
        *("backend=flashinfer", "kv_cache_dtype=bf16", "bench.peers=[flashinfer]", DECODE),
        *("bench.op=[forward_mqa.step]", "bench.kind=[swa,c4a,c128a]", "bench.tokens=[1,8,64,512]"),
    ),
    (
        *("backend=flashinfer", "kv_cache_dtype=fp8", DECODE),
        *("bench.op=[forward_mqa.step]", "bench.kind=[c4a]", "bench.tokens=[1,64,512]"),
    ),
    *(
        (
            *(f"backend={backend}", f"kv_cache_dtype={dtype}", "bench.op=[layer.step]", DECODE),
            *("bench.kind=[swa,c4a,c128a]", "bench.tokens=[1,64,256]"),
        )
        for dtype in ("bf16", "fp8_e4m3")
        for backend in ("flashinfer", "triton")
    ),
    (
        *("backend=flashinfer", "kv_cache_dtype=bf16", DECODE, "bench.op=[prepare_step]"),
        *("bench.kind=[swa,c4a,c128a]", "bench.tokens=[1,64,512]"),
    ),
    # The kernels of entries that `auto` chooses from.
    *(
        (
            *("backend=flashinfer", f"backend.compressor={kernels}", "kv_cache_dtype=bf16"),
            *("bench.op=[compress]", "bench.kind=[c4a,c128a]", *phase),
        )
        for phase in (
            (DECODE, "bench.tokens=[1,64,512]"),
            ("bench.phase=[prefill]", "bench.tokens=[8192]"),
        )
        for kernels in ("core", "cute")
    ),
)


def run(out: str, commit: str | None = None) -> int:
    """Measure all sets; the exit code is 1 where something failed."""
    common = [*COMMON, f"bench.out={out}", *([] if commit is None else [f"bench.commit={commit}"])]
    return max(main([*common, *own]) for own in SETS)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
