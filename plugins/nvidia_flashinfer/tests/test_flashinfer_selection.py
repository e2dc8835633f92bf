"""What is refused, with which words, without a GPU and without FlashInfer; which calls fit the library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import stub_flashinfer
import torch
from dsv4_plugin_flashinfer import library, plugin
from dsv4_plugin_flashinfer.plugin import FlashInferOptions

from dsv4core import libraries
from dsv4core.api import (
    C4A,
    C128A,
    SWA,
    ConfigError,
    LayerKind,
    LayerScales,
    LayerWeights,
    Limits,
    Request,
    Weight,
)
from dsv4core.kvcache import KV_CACHE_DTYPES, accepted_dtypes
from dsv4core.model.shapes import PRESETS, layer_spec
from dsv4core.testing.case import Case
from dsv4core.testing.host import Host
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite import test_attention
from dsv4core.testing.suite.test_calls import *  # noqa: F403

REQUEST = Request(
    platform="cuda",
    arch="sm_100",
    model=PRESETS["v4_flash"],
    num_heads=64,
    limits=Limits(64, 8, 4096, 64),
    probe="static",
)


@pytest.fixture(autouse=True)
def nothing_installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Distributions by version, as a test wants them."""
    found = {"torch": "2.13.0"}
    for module in (library, libraries):
        monkeypatch.setattr(module, "installed", found.get)
    return found


@pytest.fixture
def dsv4() -> Subject:
    """The backend itself, whose calls are followed; nothing is computed."""
    return Subject("flashinfer")


@pytest.fixture
def stubbed(stub: None) -> Subject:
    return Subject("flashinfer", device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        (
            {"arch": "sm_120"},
            "arch",
            "FlashInfer's kernels for sm_120 read packed rows, and this backend has",
        ),
        ({"arch": "sm_90"}, "arch", "It is made for sm_100 and sm_103, and this is sm_90."),
        ({"num_heads": 256}, "q-heads", "256 query heads a rank, and its kernels have 128 at most."),
        ({"dtype": "float32"}, "model", "Activations are float32, and its outputs are bfloat16."),
        ({"context_parallel": 2}, "parallel", "context_parallel=2, and a rank's kernels read the whole"),
        (
            {"model": replace(REQUEST.model, sliding_window=64)},
            "model",
            "A window of 64 tokens and heads of 512, and its kernels have 128 and 512.",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], code: str, text: str) -> None:
    (reason,) = plugin.dsv4_unsupported_reasons(replace(REQUEST, **changes))
    assert reason.code == code
    assert reason.text.startswith(text)
    assert reason.fix
    assert plugin.dsv4_unsupported_reasons(REQUEST) == []


def test_packed_rows_are_refused() -> None:
    accepted = accepted_dtypes(KV_CACHE_DTYPES, plugin.KV_FORMATS)
    assert accepted == ["auto", "fp8", "fp8_e4m3", "bf16", "bfloat16"]
    names = {
        asked: plugin.dsv4_resolve_kv_cache(replace(REQUEST, kv_cache_dtype=asked)).window.name
        for asked in accepted
    }
    assert names == dict.fromkeys(accepted, "bf16") | dict.fromkeys(("fp8", "fp8_e4m3"), "fp8_e4m3")
    with pytest.raises(ConfigError, match="kv_cache_dtype=fp8_ds_mla is not one that backend=flashinfer can"):
        plugin.dsv4_resolve_kv_cache(replace(REQUEST, kv_cache_dtype="fp8_ds_mla"))


def test_unknown_launch() -> None:
    with pytest.raises(ConfigError, match="backend.launch=mixed is not known; write split or single"):
        FlashInferOptions(launch="mixed")


@pytest.fixture
def with_library(
    nothing_installed: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ModuleType:
    """FlashInfer 0.6.18 and its cubins are there."""
    nothing_installed[library.DISTRIBUTION] = "0.6.18.post1"
    module = stub_flashinfer.modules()["flashinfer.mla"]
    monkeypatch.setattr(library, "import_module", lambda name: module)
    (tmp_path / "fmha.cubin").touch()
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path))
    return module


def test_a_library_that_fits(with_library: ModuleType) -> None:
    assert list(library.reasons("host", strided=True)) == []


def test_missing_cubins(with_library: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path / "none"))
    (reason,) = library.reasons("host", strided=False)
    assert (reason.code, reason.fix) == (
        "artifact-missing",
        "Run `flashinfer download-cubin` where there is a network.",
    )
    assert list(library.reasons("static", strided=False)) == []


def test_a_library_without_storage_offsets(with_library: ModuleType) -> None:
    def older(**arguments: Any) -> None: ...

    older.__signature__ = library.inspect.Signature(  # type: ignore[attr-defined]
        [library.inspect.Parameter(name, library.inspect.Parameter.KEYWORD_ONLY) for name in library.NEEDED]
    )
    vars(with_library)[library.DECODE] = older
    assert list(library.reasons("host", strided=False)) == []
    (reason,) = library.reasons("host", strided=True)
    assert (reason.code, reason.text) == (
        "layout",
        "flashinfer-python 0.6.18.post1 takes pages without padding, and the host's have some.",
    )


def test_a_library_without_the_kernel(with_library: ModuleType) -> None:
    del vars(with_library)[library.DECODE]
    (reason,) = library.reasons("host", strided=False)
    assert reason.text == f"flashinfer-python 0.6.18.post1 has no {library.DECODE}."
    assert reason.fix == "Run `pip install 'flashinfer-python>=0.6.18,<0.8'`."


@pytest.mark.parametrize(("heads", "padded"), [(1, 8), (8, 8), (17, 32), (64, 64), (128, 128)])
def test_plans(heads: int, padded: int) -> None:
    request = replace(REQUEST, num_heads=heads, kv_cache_dtype="fp8")
    spec = replace(layer_spec(request.model, 2), num_heads=heads)
    plan = plugin.dsv4_plan_layer(request, spec, FlashInferOptions())
    assert (plan.padded_q_heads, plan.q_dtype) == (padded, "float8_e4m3fn")
    assert "launch=split" in plan.variant


def test_scales_are_numbers(stub: None) -> None:
    """Once for scores, with the softmax's own; once for values: of FP8 rows, and of bf16 rows none."""
    from dsv4_plugin_flashinfer.layer import Layer

    spec, scales = layer_spec(REQUEST.model, 0), LayerScales(q=0.5, kv=0.25)
    weights = LayerWeights({"attn_sink": Weight(torch.zeros(64))}, torch.zeros(1, 64), scales)
    found = []
    for dtype in ("fp8", "bf16"):
        request = replace(REQUEST, kv_cache_dtype=dtype)
        plan = plugin.dsv4_plan_layer(request, spec, FlashInferOptions())
        plan = replace(plan, core_ops="torch")
        layer = Layer(spec, plan, weights, torch.device("cpu"))
        found.append((layer._score_scale, layer._value_scale))
    softmax = REQUEST.model.softmax_scale
    assert found == [(softmax * 0.125, 0.25), (softmax, 1.0)]


@pytest.mark.parametrize("kind", [SWA, C4A, C128A], ids=lambda kind: kind.name)
@pytest.mark.parametrize("launch", ["split", "single"])
@pytest.mark.parametrize("host_lengths", [False, True])
def test_mixed_steps(stubbed: Subject, host_lengths: bool, launch: str, kind: LayerKind) -> None:
    """Decodes before prefills, in two launches or in one; tables are made once a step."""
    subject = replace(stubbed, options=FlashInferOptions(launch=launch))
    host = Host(subject, Case(kind, heads=24, host_lengths=host_lengths))
    test_attention.compare(host, (700, 300, 64, 0), (1, 1, 5, 7))
    assert len(host.kind.state.launches) == (2 if launch == "split" else 1)
    assert (host.kind.state.shared is None) == (kind is C4A)
