"""What the core's kernels need is a reason of whoever asks for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsv4core.api import BackendUnavailable, LayerPlan, Limits, ModelShape, Request
from dsv4core.framework.kernels import kernel_reasons
from dsv4core.framework.selection import select
from dsv4core.model.shapes import PRESETS
from dsv4core.testing.fakes import install_backend, isolate

FLASH = PRESETS["v4_flash"]
IN_KERNELS = """\
from dataclasses import replace
from dsv4core.backends.reference import *
from dsv4core.backends import reference
from dsv4core.api import hookimpl

@hookimpl
def dsv4_plan_layer(request, layer):
    return replace(reference.dsv4_plan_layer(request, layer), core_ops="triton")
"""


def request(platform: str = "cuda", arch: str = "sm_90", model: ModelShape = FLASH) -> Request:
    limits = Limits(max_tokens=8, max_requests=8, max_model_len=4096, max_query_len=8)
    return Request(platform, arch, model, model.num_attention_heads, limits)  # type: ignore[arg-type]


def texts(asked: Request) -> list[str]:
    return [str(reason) for reason in kernel_reasons(asked)]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run(name: str) -> None:
    for platform, arch in (("cuda", "sm_80"), ("cuda", "sm_120"), ("rocm", "gfx942")):
        assert texts(request(platform, arch, PRESETS[name])) == []


def test_architectures() -> None:
    assert texts(request(arch="sm_75")) == [
        "[arch] The core's kernels need sm_80 or newer, and this is sm_75."
    ]
    assert texts(request("rocm", "gfx90a")) == [
        "[arch] The core's kernels were compiled for gfx942 and gfx950, and this is gfx90a."
    ]


def test_sizes() -> None:
    odd = replace(FLASH, head_dim=576, index_n_heads=48, o_lora_rank=1000, index_topk=9000)
    assert texts(request(model=odd)) == [
        "[head-dim] head_dim is 576, and the core's kernels take powers of two. Use backend=reference.",
        "[model] index_n_heads is 48, and the core's kernels take powers of two. Use backend=reference.",
        "[model] o_lora_rank is 1000, and the core's kernels multiply groups of 128 rows. "
        "Use backend=reference.",
        "[model] index_topk is 9000, and the core's kernel chooses 8192 at most. Use backend=reference.",
    ]


def test_a_plan_that_asks_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_backend(tmp_path, "wave", IN_KERNELS)
    isolate(tmp_path, monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert select(request(), "wave").plans["swa"].core_ops == "triton"
    with pytest.raises(BackendUnavailable, match="The core's kernels need sm_80 or newer, and this is sm_75"):
        select(request(arch="sm_75"), "wave")
    with pytest.raises(BackendUnavailable, match="kernels are for GPUs, and the request is for cpu"):
        select(request("cpu", ""), "wave")


def test_a_plan_names_an_implementation() -> None:
    with pytest.raises(ValueError, match="core_ops='cuda' of a plan is not known; use torch or triton"):
        LayerPlan(padded_q_heads=1, q_dtype="bfloat16", core_ops="cuda")  # type: ignore[arg-type]
