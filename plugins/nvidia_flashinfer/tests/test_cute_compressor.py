"""The compressor in CuTe DSL: refusals anywhere; on a GPU entries as the definition makes them."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from dsv4_plugin_flashinfer import library, plugin
from dsv4_plugin_flashinfer.plugin import FlashInferOptions

from dsv4core import ops
from dsv4core.api import C4A, C128A, ConfigError, LayerKind, LayerScales, Limits, Request
from dsv4core.model.shapes import PRESETS, layer_spec
from dsv4core.testing.ledger import Ledger
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite import test_caches

REQUEST = Request(
    platform="cuda",
    arch="sm_90",
    model=PRESETS["v4_flash"],
    num_heads=64,
    limits=Limits(64, 8, 4096, 64),
    probe="static",
)
CUTE = FlashInferOptions(compressor="cute")
on_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("cutlass") is None, reason="No GPU, or no nvidia-cutlass-dsl."
)


@pytest.mark.parametrize(("layer", "owned"), [(0, False), (2, True), (3, True)])
def test_plans(layer: int, owned: bool) -> None:
    """Of layers that compress, at the seam of layers, where it is asked for."""
    spec = layer_spec(REQUEST.model, layer)
    assert ("compress" in plugin.dsv4_plan_layer(REQUEST, spec, CUTE).own_ops) == owned
    for request, options in ((replace(REQUEST, seam="kernel"), CUTE), (REQUEST, FlashInferOptions())):
        assert not plugin.dsv4_plan_layer(request, spec, options).own_ops


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="backend.compressor=triton is not known; write auto, core or cute"):
        FlashInferOptions(compressor="triton")
    monkeypatch.setattr(library, "installed", lambda name: None)
    (reason,) = library.cute_reasons("host", "cuda")
    assert (reason.code, reason.text) == (
        "package-missing",
        "backend.compressor=cute needs nvidia-cutlass-dsl, which is not installed.",
    )
    assert reason.fix == ("Run `pip install 'nvidia-cutlass-dsl>=4.6.2,<5'`, or set backend.compressor=core.")
    monkeypatch.setattr(library, "installed", lambda name: "4.3.5")
    (reason,) = library.cute_reasons("host", "cuda")
    assert (reason.code, reason.text) == (
        "package-version",
        "backend.compressor=cute needs nvidia-cutlass-dsl>=4.6.2,<5, and 4.3.5 is installed.",
    )
    (reason,) = library.cute_reasons("host", "rocm")
    assert reason.text == "backend.compressor=cute is for NVIDIA's GPUs, and this is rocm."
    assert list(library.cute_reasons("static", "cuda")) == []


@pytest.fixture
def dsv4() -> Subject:
    return Subject("flashinfer", options=CUTE, device=torch.device("cuda"))


@on_a_gpu
@pytest.mark.parametrize("kind", [C4A, C128A], ids=lambda kind: kind.name)
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3"])
def test_what_steps_write(dsv4: Subject, format: str, kind: LayerKind) -> None:
    """A prompt in chunks beside a decode; then pages of 61, pages that are apart, and a scale."""
    sizes = test_caches.OTHERS["pages-of-61"]
    scales = LayerScales(kv=0.0375) if format == "fp8_e4m3" else LayerScales()
    for changes in ({}, sizes, {"page_gap": 3}, {"scales": scales}):
        test_caches.write_and_check(Ledger(dsv4, test_caches.case(kind, kv_cache_dtype=format, **changes)))


@on_a_gpu
@pytest.mark.parametrize("kind", [C4A, C128A], ids=lambda kind: kind.name)
def test_the_suites_checks(dsv4: Subject, kind: LayerKind) -> None:
    """Slots of -1, the same bytes again, rows of any magnitude."""
    test_caches.test_slot_minus_one_stores_nothing(dsv4, kind)
    test_caches.test_writing_again_writes_the_same_bytes(dsv4, kind)
    for factor in (1e-3, 1e3):
        test_caches.test_rows_of_any_magnitude(dsv4, factor, kind)


@on_a_gpu
@pytest.mark.parametrize("kind", [C4A, C128A], ids=lambda kind: kind.name)
def test_chunks_leave_the_same_bytes(dsv4: Subject, kind: LayerKind) -> None:
    """Whatever attention, which is not made bit by bit, declares."""
    found = []
    for chunks in test_caches.CHUNKS:
        ledger = Ledger(dsv4, test_caches.case(kind))
        test_caches.write_chunks(ledger, chunks)
        found.append(test_caches.snapshots(ledger)["compressed"])
    assert all(torch.equal(own, found[0]) for own in found[1:])


def both(dsv4: Subject, kind: LayerKind, format: str, spoilt: bool) -> list[torch.Tensor]:
    """Entries after a prompt, of the definition and of the kernels, as raw elements."""
    from dsv4_plugin_flashinfer.compress import cute

    found = []
    modules: list[ModuleType] = [ops, cute]
    for module in modules:
        ledger = Ledger(dsv4, test_caches.case(kind, kv_cache_dtype=format))
        ledger.attention.compressors = None
        projected = ledger.project(300)
        assert projected.entry is not None
        if spoilt:
            projected.entry[17, 5], projected.entry[130, -3] = float("nan"), float("nan")
        step = ledger.stack.plan((0,), (300,))
        weights, caches = ledger.weights, ledger.caches
        vectors = [weights[f"compressor.{name}"].data.float().cuda() for name in ("ape", "norm")]
        arguments = (projected.entry, *vectors, ledger.attention.rope, 1e-6, kind, step)
        module.compress(*arguments, caches.state, caches.compressed)
        found.append(caches.compressed.pool.view(torch.uint8).clone())
    return found


@on_a_gpu
@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("kind", [C4A, C128A], ids=lambda kind: kind.name)
def test_as_the_definition(dsv4: Subject, kind: LayerKind, format: str, spoilt: bool) -> None:
    """bf16 rows but for sums at an edge, FP8 rows to one code; NaN where NaN goes in."""
    due, found = both(dsv4, kind, format, spoilt)
    dtype = torch.bfloat16 if format == "bf16" else torch.float8_e4m3fn
    values = [own.view(dtype).float() for own in (due, found)]
    assert torch.equal(*(own.isnan() for own in values))
    due, found = (own.nan_to_num() for own in values)
    assert float((due != found).float().mean()) < 1e-3
    # Sums near 0 of large terms differ by more than a step of their own: by one of a code, or of the terms.
    tolerance = {"rtol": 2**-7, "atol": 1e-5} if format == "bf16" else {"rtol": 2**-3, "atol": 2**-9}
    torch.testing.assert_close(found, due, **tolerance)
