"""The backend's portable kernels on an NVIDIA GPU, over packed caches that other backends have written.

    pytest -m gpu plugins/rocm_aiter/tests/test_aiter_on_nvidia.py

The same bytes and the same answers, without AITER: every route is the core's, and lists are written beside.
That the backend's own caches have the reference's bytes is seen on a CPU, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dsv4_plugin_rocm_aiter import library, plugin, ragged
from dsv4_plugin_rocm_aiter.layer import Layer, SharedStep
from dsv4_plugin_rocm_aiter.plugin import AiterOptions, Plan
from dsv4_plugin_rocm_aiter.ragged import RaggedLists
from dsv4_plugin_rocm_aiter.ragged import triton as kernel
from stub_aiter import Install

from dsv4core import ops
from dsv4core.api import (
    C4A,
    C128A,
    SWA,
    KVCacheLayout,
    LayerCaches,
    LayerKind,
    LayerWeights,
    Limits,
    Request,
    Step,
    Weight,
)
from dsv4core.kvcache import allocate_cache
from dsv4core.ops.sparse_mla import Rows
from dsv4core.testing.case import Case
from dsv4core.testing.compare import assert_attention, assert_lse, assert_rows, assert_same, snapshot
from dsv4core.testing.ledger import Ledger
from dsv4core.testing.subject import Refused, Subject
from dsv4core.testing.tolerances import ATTENTION, PROJECTION

HERE = torch.cuda.is_available() and torch.version.hip is None
DEVICE, CORE = torch.device("cuda" if HERE else "cpu"), "triton"
KINDS = [SWA, C4A, C128A]
WRITERS = ("reference", "triton", "flashmla", "hopper")
OFF = 1e-2
"""Bytes of a region that may differ: a value at the edge between two codes may fall to either side."""
LIMITS = Limits(max_tokens=512, max_requests=4, max_model_len=2048, max_query_len=512)


def on_gpu(test: Any) -> Any:
    """For a test, or one of its parameters."""
    marks = pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="no NVIDIA GPU is here")
    if isinstance(test, str):
        return pytest.param(test, marks=marks)
    for mark in marks:
        test = mark(test)
    return test


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans as they are for one of AMD's chips, without AITER."""
    monkeypatch.setattr(library, "installed", lambda name: None)

    def chosen(arch: str) -> None:
        monkeypatch.setattr(plugin, "chip_of", lambda request: arch)

    return chosen


def planned(request: Request, ledger: Ledger) -> Plan:
    """The plan, with the core's kernels, which it has for AMD's GPUs."""
    own = replace(request, kv_cache_dtype="fp8_ds_mla", probe="static")
    plan = plugin.dsv4_plan_layer(own, ledger.attention.layer, AiterOptions())
    assert set(plan.routes.values()) == {"the core"}
    return replace(plan, core_ops=CORE)  # type: ignore[arg-type]


def built(ledger: Ledger) -> tuple[Layer, SharedStep]:
    """A layer with the weights of another backend's, and the shared state of its kind."""
    plan = planned(ledger.stack.selection.request, ledger)
    tensors = {name: on_device(ledger.weights[name]) for name in ("attn_sink", "wo_a", "wo_b")}
    weights = LayerWeights(tensors, ledger.attention.rope)
    layer = Layer(ledger.attention.layer, plan, weights, DEVICE)
    return layer, SharedStep(ledger.stack.selection.request, ledger.case.kind, plan, DEVICE)


def on_device(weight: Weight) -> Weight:
    scale = None if weight.scale is None else weight.scale.to(DEVICE)
    return Weight(weight.data.to(DEVICE), scale, weight.block)


def layout_of(ledger: Ledger) -> KVCacheLayout:
    """Packed rows, as the backend plans them for the chosen chip."""
    return plugin.dsv4_resolve_kv_cache(replace(ledger.stack.selection.request, kv_cache_dtype="fp8_ds_mla"))


def filled(subject: str | Subject, kind: LayerKind) -> tuple[Ledger, Step]:
    """Caches that a backend has written: a prompt, then a decode beside a longer prompt."""
    case = Case(kind, heads=64, kv_cache_dtype="fp8_ds_mla", index_topk=64, limits=LIMITS)
    if isinstance(subject, str):
        subject = Subject(subject, device=DEVICE)
    name = subject.name
    try:
        ledger = Ledger(subject, case)
    except Exception as error:
        if name in ("reference", "triton") or not isinstance(error, (Refused, RuntimeError)):
            raise
        pytest.skip(f"backend={name} does not run here: {error}")
    ledger.step((0, 0), (300, 77))
    ledger.step((300, 77), (1, 200))
    return ledger, ledger.step((301, 277), (1, 9))


@on_gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("writer", WRITERS)
def test_the_same_answers(writer: str, kind: LayerKind, chip: Any) -> None:
    """Attention and log-sum-exp over another backend's bytes, as that backend attends them."""
    chip("gfx950")
    ledger, step = filled(writer, kind)
    selected = ledger.select(step)
    before = [snapshot(own) for own in (ledger.caches.window, ledger.caches.compressed)]
    heads, bound = ledger.case.heads, ledger.attention.bound
    theirs = bound.forward_mqa(
        *(ledger.q, ledger.caches, selected, step.positions, step, ledger.kind_state, None, True, True)
    )
    layer, state = built(ledger)
    state.plan(step)
    q = ledger.q[:, :heads].to(torch.bfloat16).contiguous()
    ours = layer.forward_mqa(q, ledger.caches, selected, step, state, True, True)
    assert_attention(ours.data, theirs.data[:, :heads].double().cpu(), step, "bfloat16")
    assert theirs.lse is not None
    assert_lse(ours.lse, theirs.lse.double().cpu(), step, "bfloat16")
    plain = layer.forward_mqa(q, ledger.caches, selected, step, state, False, True)
    assert_attention(plain.data, ours.data.double().cpu(), step, "bfloat16")
    for own, cache in zip(before, (ledger.caches.window, ledger.caches.compressed), strict=True):
        if own is not None:
            assert_same(snapshot(cache), own, "what attention reads")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "writer", ["reference", "rocm_aiter", *(on_gpu(name) for name in WRITERS if name != "reference")]
)
def test_the_same_bytes(writer: str, kind: LayerKind, install: Install) -> None:
    """Windows, entries and the indexer's keys, as the definition writes them from the same projections."""
    theirs, _ = filled("reference", kind)
    ours, _ = filled(install("gfx950") if writer == "rocm_aiter" else writer, kind)
    for name in ("window", "compressed", "index"):
        due, found = getattr(theirs.caches, name), getattr(ours.caches, name)
        assert (due is None) == (found is None)
        if due is None or found is None:
            continue
        assert found.format == due.format
        slots = torch.tensor(sorted(theirs.accounts[name].rows))
        assert len(slots), f"nothing was written to the {name} cache"
        page, row = slots // due.page_size, slots % due.page_size
        for one, other in zip(found.regions, due.regions, strict=True):
            own, definition = (region.cpu()[page, row].view(torch.uint8) for region in (one, other))
            differing = float((own != definition).float().mean())
            assert differing < OFF, f"{differing:.2%} of the bytes of the {name} cache differ."


@on_gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_windows_in_fnuz_beside_entries_in_ocp(kind: LayerKind, chip: Any) -> None:
    """gfx942's pools, which no NVIDIA kernel has instructions for: codes are turned with integers."""
    chip("gfx942")
    ledger, step = filled("triton", kind)
    layout = layout_of(ledger)
    assert (layout.window.fp8, layout.compressed.fp8) == ("e4m3fnuz", "e4m3fn")
    size = ledger.caches.window.num_pages, ledger.caches.window.page_size
    window = allocate_cache(layout.window, *size, DEVICE)
    every = torch.arange(size[0] * size[1], device=DEVICE)
    rows = ledger.caches.window.read(every)
    known = rows.isfinite().all(-1)
    window.write(every[known], rows[known])
    caches = LayerCaches(window, ledger.caches.compressed)
    selected = ledger.select(step)
    layer, state = built(ledger)
    state.plan(step)
    q = ledger.q[:, : ledger.case.heads]
    ours = layer.forward_mqa(q, caches, selected, step, state, True, True)
    pools = [Rows(window, state.window, state.window_lengths)]
    if caches.compressed is not None and state.entry_lengths is not None:
        if selected is not None:
            entries = Rows(caches.compressed, state.chosen(selected, step, slice(None)), state.entry_lengths)
        else:
            assert state.entries is not None
            entries = Rows(caches.compressed, state.entries, state.entry_lengths, step.token_to_request)
        pools.append(entries)
    sinks = ledger.weights["attn_sink"].data.float().to(DEVICE)
    due, _ = ops.sparse_mla(q, pools, ledger.case.model.softmax_scale, sinks)
    assert_rows(ours.data, due.double().cpu(), ATTENTION["bfloat16"], "attention output", step)
    wrong = replace(window, format=layout.compressed)
    misread = layer.forward_mqa(q, replace(caches, window=wrong), selected, step, state, False, True)
    with pytest.raises(AssertionError, match="attention output"):
        assert_rows(misread.data, due.double().cpu(), ATTENTION["bfloat16"], "attention output", step)


@on_gpu
@pytest.mark.parametrize("tokens", [1, 65, 1000])
def test_lists_of_real_sizes(tokens: int) -> None:
    """Tables of 8,192 columns, holes anywhere: as the definition writes them."""
    random = torch.Generator().manual_seed(tokens)
    slots = torch.randint(-(1 << 20), 1 << 24, (tokens, 8192), generator=random).int().to(DEVICE)
    lengths = torch.randint(0, 8193, (tokens,), generator=random).to(DEVICE)
    for least in (0, 1):
        rooms = [RaggedLists.empty(tokens, 8192, DEVICE) for _ in range(2)]
        due = ragged.ragged_lists(slots, lengths, None, least, rooms[0])
        found = kernel.ragged_lists(slots, lengths, None, least, rooms[1])
        assert_same(found.starts, due.starts, "where lists begin")
        total = int(due.starts[-1])
        assert_same(found.indices[:total], due.indices[:total], "lists")


@on_gpu
def test_the_projection_in_bf16(chip: Any) -> None:
    """Heads rotated back by a kernel, then torch's product, against the definition."""
    chip("gfx942")
    ledger, _ = filled("triton", SWA)
    layer, _ = built(ledger)
    assert layer.describe()["o_proj"] == "einsum"
    heads, model = ledger.case.heads, ledger.case.model
    for tokens in (1, 77):
        attention = torch.randn(tokens, heads, 512, device=DEVICE).bfloat16()
        positions = torch.randint(0, 2048, (tokens,), device=DEVICE)
        prepared = [ops.prepare_linear(on_device(ledger.weights[name])) for name in ("wo_a", "wo_b")]
        due = ops.o_proj(attention, positions, ledger.attention.rope, *prepared, model.o_groups)
        found = layer.o_proj(attention, positions)
        assert_rows(found, due.double().cpu(), PROJECTION["bfloat16"], "output projection")
