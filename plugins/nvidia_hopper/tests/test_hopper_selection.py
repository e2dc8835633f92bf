"""What is refused, with which words, and what is planned: without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dsv4_plugin_hopper import plugin
from dsv4_plugin_hopper.plugin import HopperOptions

from dsv4core import libraries
from dsv4core.api import ConfigError, Limits, Request
from dsv4core.model.shapes import PRESETS, layer_spec

REQUEST = Request(
    platform="cuda",
    arch="sm_90",
    model=PRESETS["v4_flash"],
    num_heads=17,
    limits=Limits(64, 8, 4096, 64),
    probe="static",
)


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"arch": "sm_100"}, "arch", "It is made for sm_90, and this is sm_100."),
        ({"dtype": "float32"}, "model", "Activations are float32, and its queries and outputs are bfloat16."),
        ({"context_parallel": 2}, "parallel", "context_parallel=2, and a rank's kernel reads the whole"),
        (
            {"model": replace(REQUEST.model, head_dim=256)},
            "head-dim",
            "Heads have 256 channels, and its kernel has 512.",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], code: str, text: str) -> None:
    (reason,) = plugin.dsv4_unsupported_reasons(replace(REQUEST, **changes), HopperOptions())
    assert reason.code == code
    assert reason.text.startswith(text)
    assert reason.fix
    assert plugin.dsv4_unsupported_reasons(REQUEST, HopperOptions()) == []


def test_f16_for_codes() -> None:
    f16, plain = HopperOptions(operands="f16"), replace(REQUEST, kv_cache_dtype="fp8_e4m3")
    (reason,) = plugin.dsv4_unsupported_reasons(plain, f16)
    assert (reason.code, reason.fix) == ("option", "Set backend.operands=bf16.")
    assert reason.text == (
        "backend.operands=f16 would lose small weights of E4M3 rows, which a pool's scale multiplies."
    )
    assert plugin.dsv4_unsupported_reasons(plain, HopperOptions()) == []
    assert plugin.dsv4_unsupported_reasons(REQUEST, f16) == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> None:
        raise RuntimeError(f"no library for {name}")

    monkeypatch.setattr(plugin, "import_module", lacking)
    monkeypatch.setattr(libraries, "installed", {"cuda-bindings": "13.0"}.get)
    (reason,) = plugin.dsv4_unsupported_reasons(replace(REQUEST, probe="host"), HopperOptions())
    assert (reason.code, reason.text) == (
        "artifact-missing",
        "NVRTC, which compiles its kernels, cannot be loaded: no library for cuda.bindings.nvrtc.",
    )
    assert reason.fix.startswith("Run `pip install nvidia-cuda-nvrtc` for the CUDA that torch")


def test_formats() -> None:
    """Packed rows where FP8 is asked for; plain ones by their names."""
    for asked, due in (("fp8", "fp8_ds_mla"), ("bf16", "bf16"), ("fp8_e4m3", "fp8_e4m3")):
        assert plugin.dsv4_resolve_kv_cache(replace(REQUEST, kv_cache_dtype=asked)).window.name == due
    with pytest.raises(ConfigError, match="kv_cache_dtype=fp32 is not one that backend=hopper can"):
        plugin.dsv4_resolve_kv_cache(replace(REQUEST, kv_cache_dtype="fp32"))


@pytest.mark.parametrize("lacking", ["", "it is not installed"])
def test_plans(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are not padded; who projects follows from what is installed."""
    monkeypatch.setattr(libraries, "deep_gemm_lacking", lambda probe: lacking)
    spec = replace(layer_spec(REQUEST.model, 2), num_heads=17)
    plan = plugin.dsv4_plan_layer(REQUEST, spec, HopperOptions(operands="f16"))
    assert (plan.padded_q_heads, plan.q_dtype, plan.core_ops) == (17, "bfloat16", "triton")
    assert plan.projection_dtype == ("" if lacking else "float8_e4m3fn")
    assert plan.variant.startswith("f16 operands, wo_a by ")
