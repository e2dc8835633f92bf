"""A stand-in for vLLM on `sys.path`, and configurations as vLLM would hand them over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_mode import GraphMode

from dsv4core.framework import known
from dsv4core.framework.known import KnownBackend

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "engine"))  # the job's checkpoint: its configuration is that of the recordings


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The stand-in, with the seams installed as the entry point would."""
    from importlib import import_module

    import dsv4_vllm.attention as adapter
    from dsv4_vllm.seams import SEAMS

    monkeypatch.syspath_prepend(HERE / "stub")
    forget()
    adapter._hosts.clear()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
        )
    for name, install in SEAMS.items():
        install(import_module(name))
    yield
    torch.distributed.destroy_process_group()
    forget()


def forget() -> None:
    """Let vLLM be imported anew."""
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


class Config(SimpleNamespace):
    """A model's configuration as transformers holds it."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@pytest.fixture
def config() -> Any:
    """Makes a vLLM configuration with something under `dsv4`, or nothing."""
    from dsv4_vllm_job.checkpoint import CONFIG

    def make(*dsv4: object, **changes: Any) -> Any:
        made = SimpleNamespace(
            additional_config={"dsv4": dsv4[0]} if dsv4 else {},
            model_config=SimpleNamespace(
                hf_config=Config(**CONFIG), max_model_len=4096, dtype=torch.bfloat16, enforce_eager=True
            ),
            # As on a GPU: 256 is set after the layers are made.
            cache_config=SimpleNamespace(cache_dtype="fp8", block_size=16, user_specified_block_size=False),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=4),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, use_ubatching=False),
            compilation_config=SimpleNamespace(cudagraph_mode=GraphMode("NONE", "NONE")),
            speculative_config=None,
        )
        for path, value in changes.items():
            group, _, name = path.rpartition("__")
            setattr(getattr(made, group) if group else made, name, value)
        return made

    return make


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend that is known, and that no developer has installed."""
    acme = KnownBackend("dsv4-plugin-acme", "kernels of nobody")
    monkeypatch.setattr(known, "KNOWN_BACKENDS", {**known.KNOWN_BACKENDS, "acme": acme})
    return "acme"
