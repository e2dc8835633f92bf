"""L2: what is written to the caches, by the backend where it owns the operation, else by the core for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4core.api import C4A, C128A, SWA, LayerCaches, LayerKind, Limits, PageSizes, Step
from dsv4core.attention import Projected
from dsv4core.kvcache import KVCache
from dsv4core.stack import AttentionStack
from dsv4core.testing.compare import assert_rows, assert_same, snapshot
from dsv4core.testing.host import NAN
from dsv4core.testing.layers import backend_stack, hidden_states, reference_stack
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite.marks import check
from dsv4core.testing.tolerances import ATTENTION, CACHED_ROW

KINDS = [pytest.param(kind, id=kind.name) for kind in (SWA, C4A, C128A)]
WITH_ENTRIES = KINDS[1:]
LIMITS = Limits(max_tokens=300, max_requests=2, max_model_len=700, max_query_len=300)


class Pair:
    """One layer on the backend and on the reference, with caches full of poison, given the same to write."""

    def __init__(self, subject: Subject, kind: LayerKind, **changes: Any) -> None:
        """Make both; `changes` as `backend_stack` takes them."""
        self.ours = backend_stack(subject, [kind], LIMITS, **changes)
        self.theirs = reference_stack(self.ours)
        self.plan = self.ours.selection.plans[kind.name]
        for stack in (self.ours, self.theirs):
            for cache in vars(caches_of(stack)).values():
                if cache is not None:
                    for region in cache.regions:
                        region.fill_(NAN)

    def write(self, computed: tuple[int, ...], query: tuple[int, ...], seed: int = 0) -> Step:
        """Insert and compress one step on both; keeps both q."""
        hidden = hidden_states(sum(query), self.theirs, seed)
        projected = self.theirs.layers[0].attention.project(hidden)
        step = self.ours.plan(computed, query)
        self.q = write(self.ours, projected, step)
        self.expected_q = write(self.theirs, projected, self.theirs.plan(computed, query))
        return step

    def compare(self) -> None:
        """All rows that are written, and that nothing else is: both allocate the same pages."""
        for name, ours in vars(caches_of(self.ours)).items():
            theirs = getattr(caches_of(self.theirs), name)
            if ours is not None:
                compare_pools(ours, theirs, name)


def caches_of(stack: AttentionStack) -> LayerCaches:
    """The caches of a stack's only layer."""
    return stack.pools.layers[stack.layers[0].spec.index]


def rows_of(projected: Projected, rows: slice) -> Projected:
    """The same projections for some tokens only."""
    parts = {name: None if value is None else value[rows] for name, value in vars(projected).items()}
    return Projected(**parts)  # type: ignore[arg-type]


def write(stack: AttentionStack, projected: Projected, step: Step) -> torch.Tensor:
    """What a layer does before it attends; q as `forward_mqa` takes it."""
    attention, caches = stack.layers[0].attention, caches_of(stack)
    q = attention.insert_kv(projected, caches, step)
    attention.compress(projected, caches, step)
    return q


def compare_pools(found: KVCache, expected: KVCache, name: str) -> None:
    """Rows that the reference left as poison are poison; the others hold its values."""
    untouched = torch.stack([(region == NAN).all(-1) for region in expected.regions]).all(0)
    ours = torch.cat([region.flatten(2) for region in found.regions], -1)
    theirs = torch.cat([region.flatten(2) for region in expected.regions], -1)
    assert_same(ours[untouched], theirs[untouched], f"Rows of the {name} cache that nobody writes")
    slots = (~untouched).flatten().nonzero().flatten()
    widths = [part.width for part in found.format.parts if part.name != "scale"]
    columns = (rows.split(widths, dim=-1) for rows in (found.read(slots), expected.read(slots)))
    for part, own, other in zip(found.format.parts, *columns, strict=False):
        what = f"{part.name} part of rows of the {name} cache"
        assert_rows(own[:, None], other[:, None], CACHED_ROW[part.dtype], what)


@check("L2", core=True, reports=("vllm#47783", "sglang#28418", "Primus#930", "vllm-deepseek-v4-sm89#46"))
@pytest.mark.parametrize("kind", KINDS)
def test_what_steps_write(dsv4: Subject, kind: LayerKind) -> None:
    """A prompt in chunks beside a decode: keys, entries, index keys and states, and nothing beside them."""
    write_and_compare(Pair(dsv4, kind))


OTHERS: dict[str, dict[str, Any]] = {
    "16 heads": {"heads": 16},
    "24 heads": {"heads": 24},
    "bf16": {"heads": 8, "kv_cache_dtype": "bf16"},
    "fp8_e4m3": {"heads": 8, "kv_cache_dtype": "fp8_e4m3"},
    "pages of 2": {"heads": 8, "page_sizes": PageSizes(window=2, context=128, state=1)},
    "pages of 61": {"heads": 8, "page_sizes": PageSizes(window=61, context=128 * 61, state=3)},
    "pages of 256": {"heads": 8, "page_sizes": PageSizes(window=256, context=1024)},
}


@check("L2", reports=("vllm#47783", "vllm#47716", "vllm#48047"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_what_steps_write_elsewhere(dsv4: Subject, changes: dict[str, Any], kind: LayerKind) -> None:
    """The same with other heads, formats and pages; padded heads of q are exact zeros."""
    pair = Pair(dsv4, kind, **changes)
    write_and_compare(pair)
    compare_queries(pair)


def write_and_compare(pair: Pair) -> None:
    """Steps of all phases around the boundaries of entries."""
    computed = (0, 0)
    for seed, query in enumerate(((130, 3), (1, 1), (3, 130), (1, 128), (124, 1), (1, 0))):
        pair.write(computed, query, seed)
        pair.compare()
        computed = (computed[0] + query[0], computed[1] + query[1])


@check("L2", core=True, reports=("Primus#930", "transformers#45910", "vllm#54815"))
@pytest.mark.parametrize("kind", KINDS)
def test_queries(dsv4: Subject, kind: LayerKind) -> None:
    """q is normalised and rotated once, at its own position; padded heads are exact zeros."""
    pair = Pair(dsv4, kind)
    pair.write((0, 0), (200, 7))
    pair.write((200, 7), (1, 1))
    compare_queries(pair)


def compare_queries(pair: Pair) -> None:
    """The last step's queries."""
    heads = pair.expected_q.shape[1]
    dtype = pair.plan.q_dtype
    assert pair.q.dtype == getattr(torch, dtype), f"q has dtype {pair.q.dtype}, and the plan says {dtype}."
    assert_rows(pair.q[:, :heads].float(), pair.expected_q.float(), ATTENTION[dtype], "query")
    padded = pair.q[:, heads:].float()
    assert padded.shape[1] == pair.plan.padded_q_heads - heads
    assert bool((padded == 0).all()), "Padded heads of q are not exact zeros."


@check("L2", core=True, reports=("vllm#55637", "sglang#31705"))
@pytest.mark.parametrize("kind", KINDS)
def test_slot_minus_one_stores_nothing(dsv4: Subject, kind: LayerKind) -> None:
    """Padding rows of a step have slot -1 in every cache."""
    pair = Pair(dsv4, kind)
    pair.write((0,), (127,))
    before = {name: snapshot(cache) for name, cache in vars(caches_of(pair.ours)).items()}
    step = pair.ours.plan((127,), (1,))
    tables = [step.window, *step.compressed.values(), *step.state.values()]
    for table in tables:
        table.slot_mapping.fill_(-1)
    attention = pair.ours.layers[0].attention
    write(pair.ours, attention.project(hidden_states(1, pair.ours)), step)
    for name, cache in vars(caches_of(pair.ours)).items():
        after, copy = snapshot(cache), before[name]
        if after is not None and copy is not None:
            assert_same(after, copy, f"A token with slot -1 wrote to the {name} cache")


@check("L2", needs=("multi-token-decode",), reports=("vllm-ascend-deepseekv4#131", "llama.cpp#25691"))
@pytest.mark.parametrize("kind", WITH_ENTRIES)
@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_rejected_drafts_leave_no_trace(dsv4: Subject, kind: LayerKind, accepted: int) -> None:
    """States survive drafts that are taken back: what follows is as if they had never been."""
    pair = Pair(dsv4, kind, decode_query_len=6)
    pair.write((0,), (125,))
    pair.write((125,), (6,), seed=1)
    for position in range(125 + accepted, 125 + accepted + 8):
        pair.write((position,), (1,), seed=position)
    pair.compare()


@check("L2", core=True, reports=("1Cat-vLLM#162",))
@pytest.mark.parametrize("kind", KINDS)
def test_writing_again_writes_the_same_bytes(dsv4: Subject, kind: LayerKind) -> None:
    """No two threads race for the same bytes: a step that is written twenty times over is the same."""
    stack = Pair(dsv4, kind).ours
    projected = stack.layers[0].attention.project(hidden_states(290, stack))
    step = stack.plan((0,), (290,))
    write(stack, projected, step)
    copies = {name: snapshot(cache) for name, cache in vars(caches_of(stack)).items()}
    for _ in range(20):
        write(stack, projected, step)
        for name, cache in vars(caches_of(stack)).items():
            found, expected = snapshot(cache), copies[name]
            if found is not None and expected is not None:
                assert_same(found, expected, f"The same step leaves another {name} cache")


@check("L2", core=True)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_write_the_same_bytes(dsv4: Subject, kind: LayerKind) -> None:
    """From the same projections, a prompt in any chunks leaves the same entries and keys, bit for bit."""
    pools = []
    for chunks in ((290,), (130, 160), (1, 2, 3, 127, 157)):
        stack = Pair(dsv4, kind).ours
        attention = stack.layers[0].attention
        projected = attention.project(hidden_states(290, stack))
        done = 0
        for count in chunks:
            part = rows_of(projected, slice(done, done + count))
            write(stack, part, stack.plan((done,), (count,)))
            done += count
        pools.append((chunks, caches_of(stack)))
    for chunks, caches in pools[1:]:
        for name in ("compressed", "index"):
            # Window pages are a ring, which chunks fill in another order; entries and index keys stay.
            found, expected = snapshot(getattr(caches, name)), snapshot(getattr(pools[0][1], name))
            if found is not None and expected is not None:
                assert_same(found, expected, f"Chunks {chunks} leave another {name} cache than one chunk")
