"""Layers on the stub by chip and version: which of AITER's kernels is called, and what comes of it."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import stub_aiter
import torch
from dsv4_plugin_rocm_aiter import calls, layer, plugin, routes
from stub_aiter import Calls, Install, Stub

from dsv4core import ops
from dsv4core.api import C4A, C128A, SWA, LayerKind, Limits
from dsv4core.testing.case import Case
from dsv4core.testing.compare import assert_attention
from dsv4core.testing.host import Host
from dsv4core.testing.ledger import Ledger
from dsv4core.testing.suite import test_attention, test_indexer, test_layers, test_projection

KINDS = [SWA, C4A, C128A]
ANY = ("fp8_ds_mla", "bf16")
CALLED = {"decode": calls.DECODES, "prefill": calls.PREFILLS}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills of any number of queries are AITER's."""
    own = tuple(replace(symbol, least_queries=1) for symbol in routes.symbols())
    monkeypatch.setattr(routes, "symbols", lambda: own)


@pytest.mark.parametrize("format", ["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("heads", [8, 40])
def test_gfx942(install: Install, called: Calls, kind: LayerKind, format: str, heads: int) -> None:
    """AITER attends plain rows of one pool; the core everything else, each pool in its flavour of FP8."""
    host = Host(install("gfx942"), Case(kind, heads=heads, kv_cache_dtype=format))
    assert (host.caches.window.format.fp8, host.plan.padded_q_heads) == (
        "e4m3fnuz" if format == "fp8_ds_mla" else None,
        heads,
    )
    if host.caches.compressed is not None and format == "fp8_ds_mla":
        assert host.caches.compressed.format.fp8 == "e4m3fn"
    for phase in ("decode", "mixed"):
        test_attention.compare(host, *test_attention.STEPS[phase])
    assert called == (Counter(pa_decode_sparse=2) if (kind, format) == (SWA, "bf16") else Counter())


@pytest.mark.parametrize(
    ("arch", "version", "kernel"),
    [
        ("gfx942", "0.1.19", "sparse_attn_prefill"),
        ("gfx942", "0.1.20", "_sparse_attn_prefill_kernel"),
        ("gfx950", "0.1.20", "pa_sparse_prefill_opus"),
    ],
)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_prefills(
    install: Install,
    called: Calls,
    few: None,
    kind: LayerKind,
    arch: str,
    version: str,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind decodes, in several turns; of packed rows, which are gathered in their pools' flavours."""
    monkeypatch.setattr(layer, "MOST_QUERIES", 16)
    host = Host(install(arch, version), Case(kind, heads=8, host_lengths=True))
    test_attention.compare(host, *test_attention.STEPS["mixed"])
    assert called[kernel] == 5  # chunks of one workspace: 73 queries, 16 at a time
    assert not set(called) - {kernel, "pa_decode_sparse"}


def test_short_prefills_of_gfx950_read_in_place(install: Install, called: Calls) -> None:
    """OPUS is taken from 1,024 queries on."""
    host = Host(install("gfx950"), Case(SWA, heads=8, host_lengths=True))
    test_attention.compare(host, *test_attention.STEPS["mixed"])
    assert called == Counter(pa_decode_sparse=1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_queries_in_turns(
    install: Install, called: Calls, kind: LayerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many a call as 32 bits count: the lists of each are a part of the step's."""
    monkeypatch.setattr(layer, "MOST_QUERIES", 16)
    host = Host(install("gfx950"), Case(kind, heads=8))
    test_attention.compare(host, *test_attention.STEPS["mixed"])
    assert called == Counter(pa_decode_sparse=5)


def test_as_many_as_32_bits_count() -> None:
    """Bytes of queries and outputs in a call, with the most heads that a rank may have."""
    assert plugin.MOST_QUERIES * 128 * 512 * 2 < 1 << 31


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_log_sum_exp_is_the_cores(install: Install, called: Calls, few: None, kind: LayerKind) -> None:
    """AITER's kernels give none."""
    host = Host(install("gfx950"), Case(kind, heads=8, host_lengths=True))
    test_attention.compare(host, *test_attention.STEPS["mixed"], want_lse=True)
    assert not called


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("arch", "format"), [("gfx950", "fp8_ds_mla"), ("gfx942", "bf16")])
def test_without_sinks(
    install: Install, called: Calls, few: None, kind: LayerKind, arch: str, format: str
) -> None:
    """AITER's kernels take one for each head in any case: its weight is 0."""
    host = Host(install(arch), Case(kind, heads=8, kv_cache_dtype=format, host_lengths=True))
    step = host.step(*test_attention.STEPS["mixed"])
    q, selected = host.query(step), host.select(step)
    output = host.attend(step, q, selected, apply_sink=False)
    assert called["pa_decode_sparse"] == int(arch == "gfx950" or kind is SWA)
    assert sum(called.values()) > called["pa_decode_sparse"]
    due, _ = host.expected(step, q, selected, None)
    assert_attention(host.heads(output), due, step, host.plan.q_dtype)


def test_pages_that_are_apart_on_gfx942(install: Install, called: Calls) -> None:
    """AITER's kernel counts rows side by side: the host says that they are not, and the core attends."""
    host = Host(install("gfx942"), Case(SWA, heads=8, kv_cache_dtype="bf16", page_gap=3))
    assert host.request.strided_pages
    assert host.plan.symbol("decode") is None
    test_attention.compare(host, *test_attention.STEPS["decode"])
    assert not called


@pytest.mark.parametrize("arch", routes.ARCHITECTURES)
def test_parts_that_are_passed(install: Install, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of 8 heads is one program: its list is divided as far as AITER divides."""
    passed, attend = [], Stub.pa_decode_sparse

    def noted(self: Stub, **own: Any) -> torch.Tensor:
        passed.append(own["kv_splits"])
        return attend(self, **own)

    monkeypatch.setattr(Stub, "pa_decode_sparse", noted)
    host = Host(install(arch), Case(SWA, heads=8, kv_cache_dtype="bf16"))
    test_attention.compare(host, (700,), (1,))
    assert passed == [16]


@pytest.mark.parametrize("arch", routes.ARCHITECTURES)
@pytest.mark.parametrize("sinks", [-math.inf, -200.0, 5.0])
@pytest.mark.parametrize("splits", [1, 4])
def test_queries_without_rows(
    install: Install, arch: str, sinks: float, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact zeros, however a list is divided: the kernel of gfx942 leaves such rows as they were."""
    monkeypatch.setattr(calls, "splits", lambda tokens, heads: splits)
    host = Host(install(arch), Case(SWA, heads=8, kv_cache_dtype="bf16"))
    step = host.step((700, 3), (1, 1))
    step.window.block_table[1] = -1
    host.plan_step(step)
    own = host.bind(torch.full((8,), sinks))
    q = host.query(step)
    out = host.attend(step, q, None, layer=own).data
    assert bool((out[1] == 0).all())
    due, _ = host.expected(step, q, None, torch.full((8,), sinks))
    torch.testing.assert_close(out[0].double(), due[0], rtol=2e-2, atol=2e-2)


def test_what_the_kernel_of_gfx942_leaves_unwritten(install: Install) -> None:
    """The stub has AITER's defect: without a sentinel in each empty list the row is whatever memory held."""
    install("gfx942")
    attend = sys.modules["aiter.ops.triton.attention.pa_decode_sparse"].pa_decode_sparse
    rows, sinks = torch.randn(4, 512).bfloat16(), torch.zeros(8)
    arguments = {"unified_kv": rows, "softmax_scale": 0.04, "attn_sink": sinks, "has_invalid": True}
    starts = torch.tensor([0, 1, 1], dtype=torch.int32)
    indices = torch.zeros(1, dtype=torch.int32)
    q = torch.randn(2, 8, 512).bfloat16()
    out = attend(q, kv_indices=indices, kv_indptr=starts, kv_splits=1, **arguments)
    assert bool(out[0].isfinite().all())
    assert bool(out[1].isnan().all())


def test_the_prefill_that_takes_the_truth_of_a_tensor(install: Install) -> None:
    """AITER 0.1.20's entry for chips that are not named: it raises for more heads than one."""
    install("gfx942")
    prefill = sys.modules["aiter.ops.triton.attention.pa_prefill_sparse"].pa_prefill_sparse
    names = next(symbol for symbol in routes.symbols() if symbol.refused).parameters
    own = dict.fromkeys(names, None) | {"q": torch.zeros(1, 8, 512), "attn_sink": torch.zeros(8)}
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
        prefill(**own)


@pytest.mark.parametrize("phase", ["chunk", "prompts"])
@pytest.mark.parametrize("arch", routes.ARCHITECTURES)
def test_scores_of_prompts(install: Install, called: Calls, few: None, arch: str, phase: str) -> None:
    """gfx942's matrix units read FNUZ: codes are those of half the value, and scores are the same."""
    ledger = Ledger(install(arch), test_indexer.case(host_lengths=True))
    step = test_indexer.run(ledger, *test_indexer.STEPS[phase])
    called.clear()
    q, weights = test_indexer.queried(ledger, step)
    test_indexer.assert_logits(test_indexer.logits(ledger, q, weights, step), ledger, step)
    assert step.host_lengths is not None
    assert called["fp8_mqa_logits"] == len(step.host_lengths.query) - step.num_decode_requests > 0


def test_the_best_entries_of_zeros(install: Install) -> None:
    """Zeros of both signs tie, and the lowest entry is taken; AITER ranks bits."""
    install("gfx950")
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0, math.nan, 3.0], [-math.inf, math.nan, 1.0, 2.0, -5.0, 9.0]])
    visible = torch.tensor([6, 5])
    assert calls.top_k(logits, visible, 3).tolist() == [[0, 1, 5], [2, 3, 4]]
    assert calls.top_k(logits, torch.tensor([1, 2]), 3).tolist() == [[0, -1, -1], [-1, -1, -1]]
    assert torch.equal(calls.top_k(logits, visible, 4), ops.index_topk(logits, visible, 4))
    assert math.isnan(float(logits[0, 4])), "A host's scores stay as they are."


@pytest.mark.parametrize(
    ("arch", "version", "product"),
    [("gfx950", "0.1.20", "aiter"), ("gfx950", "0.1.19", "einsum"), ("gfx942", "0.1.20", "einsum")],
)
def test_projections(install: Install, called: Calls, arch: str, version: str, product: str) -> None:
    """In FP8 by AITER on gfx950 from 0.1.20 on; else heads are rotated, and torch multiplies in bf16."""
    subject = install(arch, version)
    host = Host(subject, Case(C4A, heads=16))
    weights = test_projection.projection_weights(host)
    bound = host.bind(host.sinks, weights)
    assert bound.state.describe()["o_proj"] == product
    for tokens in (0, 1, 33):
        positions = torch.randperm(4096, generator=host.random)[:tokens]
        test_projection.compare(host, bound, weights, positions)
    fp8 = 2 if product == "aiter" else 0
    assert (called["inverse_rope_group_quant"], called["batched_gemm_a8w8_mxscale"]) == (fp8, fp8)


def test_weights_that_aiter_does_not_multiply(install: Install) -> None:
    """Scales that are no powers of two would be rounded: torch multiplies, and the layer says so."""
    host = Host(install("gfx950"), Case(SWA, heads=16))
    weights = test_projection.projection_weights(host)
    scale = weights["wo_a"].scale
    assert scale is not None
    weights["wo_a"] = replace(weights["wo_a"], scale=scale.float() * 1.5)
    bound = host.bind(host.sinks, weights)
    assert bound.state.describe()["o_proj"] == "einsum"
    test_projection.compare(host, bound, weights, torch.arange(7))


@pytest.mark.parametrize(
    "options", [{"projection": "core"}, {"core": ["o_proj"]}, {"core": ["inverse_rope_quant"]}], ids=str
)
def test_the_cores_projection(install: Install, options: dict[str, Any]) -> None:
    host = Host(install("gfx950", **options), Case(SWA, heads=16))
    weights = test_projection.projection_weights(host)
    bound = host.bind(host.sinks, weights)
    assert bound.state.describe()["o_proj"] == "core"
    test_projection.compare(host, bound, weights, torch.arange(7))


def test_everything_by_the_core(install: Install, called: Calls) -> None:
    """What the user leaves to the core AITER is not asked for."""
    subject = install("gfx950", core=list(routes.OPERATIONS))
    test_layers.test_layer(subject, C4A)
    assert not called


def test_whole_layers_of_gfx942(install: Install, called: Calls) -> None:
    """Keys are written in the pools' flavours and read in them, and the compressor's entries, too."""
    subject = install("gfx942")
    for kind in KINDS:
        test_layers.test_layer(subject, kind)
    assert called["top_k_per_row_prefill"] > 0


def test_where_lists_lie(install: Install) -> None:
    """The window's and C128A's once a step, C4A's for each layer, in buffers that stay where they are."""
    limits = Limits(max_tokens=16, max_requests=4, max_model_len=4096, max_query_len=16)
    places: dict[str, set[tuple[int, int]]] = {}
    subject = install("gfx950")
    for kind in (C4A, C128A):
        host = Host(subject, Case(kind, heads=8, graph=True, limits=limits))
        state = host.kind.state
        for computed in ((700, 5), (4000, 130), (1, 2000)):
            step = host.step(computed, (1, 1))
            q, selected = host.query(step), host.select(step)
            window = state.window_lists
            host.attend(step, q, selected)
            assert state.window_lists is window, "Layers share the window's lists."
            rooms = (state._window_room, state._entry_room)
            places.setdefault(kind.name, set()).add(tuple(room.indices.data_ptr() for room in rooms))
            assert (state.entry_lists is None) == (kind is C4A)
    assert {name: len(own) for name, own in places.items()} == {"c4a": 1, "c128a": 1}


def test_the_stub_computes_every_route() -> None:
    """A symbol that a route takes and the stub does not have would be found in no test."""
    for symbol in routes.symbols():
        reachable = not symbol.refused and set(symbol.layouts or ANY) & {*ANY, "index_fp8"}
        if symbol.op in CALLED:
            assert (symbol.name in CALLED[symbol.op]) == bool(reachable), f"{symbol} would be another's call."
        assert hasattr(stub_aiter.Stub, symbol.name) == bool(reachable or symbol.refused), symbol.name
