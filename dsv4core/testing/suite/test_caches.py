"""L2: q, and what is written to the caches, by the backend where it owns the operation, else by the core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4core.api import C4A, C128A, SWA, LayerKind, LayerScales, Limits, PageSizes
from dsv4core.attention import Projected
from dsv4core.testing.case import Case
from dsv4core.testing.compare import assert_same, snapshot
from dsv4core.testing.ledger import Ledger
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite.marks import check, large

KINDS = [pytest.param(kind, id=kind.name) for kind in (SWA, C4A, C128A)]
WITH_ENTRIES = KINDS[1:]
WRITERS = ("insert_kv", "compress")
LIMITS = Limits(max_tokens=300, max_requests=2, max_model_len=700, max_query_len=300)


def case(kind: LayerKind, **changes: Any) -> Case:
    """A layer of few heads with caches for two requests."""
    return replace(Case(kind, heads=0, limits=LIMITS, private_output=True), **changes)


def write_and_check(ledger: Ledger) -> None:
    """Steps of all phases around the boundaries of entries."""
    computed = (0, 0)
    for query in ((130, 3), (1, 1), (3, 130), (1, 128), (124, 1), (1, 0)):
        step = ledger.step(computed, query)
        ledger.check()
        ledger.check_queries(step)
        computed = (computed[0] + query[0], computed[1] + query[1])


@check("L2", core=True, owned=WRITERS, reports=("vllm#47783", "sglang#28418", "vllm-deepseek-v4-sm89#46"))
@pytest.mark.parametrize("kind", KINDS)
def test_what_steps_write(dsv4: Subject, kind: LayerKind) -> None:
    """A prompt in chunks beside a decode: keys, entries, index keys and states, and nothing beside them."""
    write_and_check(Ledger(dsv4, case(kind, heads=64)))


OTHERS: dict[str, dict[str, Any]] = {
    "16-heads": {"heads": 16},
    "24-heads": {"heads": 24},
    "128-heads": {"heads": 128},
    "bf16": {"kv_cache_dtype": "bf16"},
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_e4m3-scaled": {"kv_cache_dtype": "fp8_e4m3", "scales": LayerScales(q=0.05, kv=0.0375)},
    "pages-of-2": {"page_sizes": PageSizes(window=2, context=128, state=1)},
    "pages-of-61": {"page_sizes": PageSizes(window=61, context=128 * 61, state=3)},
    "pages-of-256": {"page_sizes": PageSizes(window=256, context=1024)},
    "pages-of-576": {"page_sizes": PageSizes(window=576, context=128 * 576, state=576)},
    "no-lengths-on-the-host": {"host_lengths": False},
    "a-dense-output": {"private_output": False},
}


@check("L2", owned=WRITERS, reports=("vllm#47783", "vllm#47716", "vllm#48047"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_what_steps_write_elsewhere(dsv4: Subject, changes: dict[str, Any], kind: LayerKind) -> None:
    """The same with other heads, formats, pages and hosts; padded heads of q are exact zeros."""
    write_and_check(Ledger(dsv4, case(kind, **changes)))


@check("L2", needs=("strided-pages",), owned=WRITERS, reports=("vllm#47783", "flashinfer#3856"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["fp8_ds_mla", "bf16", "fp8_e4m3"])
def test_writing_to_strided_pages(dsv4: Subject, format: str, kind: LayerKind) -> None:
    """Pools whose pages are followed by bytes of something else, which stay as they are."""
    write_and_check(Ledger(dsv4, case(kind, kv_cache_dtype=format, page_gap=3)))


@check("L2", owned=WRITERS, reports=("vllm#55184",))
@pytest.mark.parametrize("kind", [pytest.param(own.values[0], id=own.id, marks=large) for own in KINDS])
def test_writing_beyond_two_gib(dsv4: Subject, kind: LayerKind) -> None:
    """Offsets in bytes take more than 32 bits in every cache."""
    pages = (1 << 31) // 8192 + 8  # the smallest page of these sizes has 8 KiB
    sizes = PageSizes(window=16, context=256 if kind is C4A else 16 * 128, state=4)
    limits = replace(LIMITS, max_tokens=270, max_requests=1, max_model_len=300)
    far = case(kind, spare_pages=pages, page_sizes=sizes, limits=limits, poison=None)
    ledger = Ledger(dsv4, far)
    for computed, query in (((0,), (257,)), ((257,), (1,)), ((258,), (20,))):
        ledger.step(computed, query)
        ledger.check()


@check("L2", core=True, owned=("insert_kv",), reports=("Primus#930", "transformers#45910", "vllm#54815"))
@pytest.mark.parametrize("kind", KINDS)
def test_queries(dsv4: Subject, kind: LayerKind) -> None:
    """q is normalised and rotated once, at its own position, however far; padded heads are exact zeros."""
    limits = Limits(max_tokens=200, max_requests=1, max_model_len=70_000, max_query_len=200)
    ledger = Ledger(dsv4, case(kind, heads=64, limits=limits))
    for computed, query in (((0,), (200,)), ((200,), (1,))):
        ledger.check_queries(ledger.step(computed, query))
    step = ledger.stack.plan((201,), (7,))
    positions = torch.tensor([0, 1, 255, 257, 4095, 65_537, 69_999], device=step.positions.device)
    step = replace(step, positions=positions)
    step.window.slot_mapping.fill_(-1)
    ledger.projected = ledger.project(7)
    ledger.q = ledger.attention.insert_kv(ledger.projected, ledger.caches, step)
    ledger.check_queries(step)


@check("L2", core=True, owned=WRITERS, reports=("vllm#47716", "sglang#33194"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [0.0, 1e-6, 100.0, 448.0, 30_000.0])
def test_rows_of_any_magnitude(dsv4: Subject, factor: float, kind: LayerKind) -> None:
    """Zeros stay zeros, small rows keep their digits, large ones are clamped: what the format says."""
    ledger = Ledger(dsv4, case(kind))
    step = ledger.stack.plan((0,), (130,))
    ledger.write(step, ledger.project(130, factor))
    ledger.check()
    ledger.check_queries(step)


@check("L2", core=True, owned=WRITERS, reports=("vllm#55637", "sglang#31705"))
@pytest.mark.parametrize("kind", KINDS)
def test_slot_minus_one_stores_nothing(dsv4: Subject, kind: LayerKind) -> None:
    """Padding rows of a step have slot -1 in every cache."""
    ledger = Ledger(dsv4, case(kind))
    ledger.step((0,), (127,))
    before = snapshots(ledger)
    step = ledger.stack.plan((127,), (1,))
    for table in (step.window, *step.compressed.values(), *step.state.values()):
        table.slot_mapping.fill_(-1)
    ledger.write(step, ledger.project(1))
    assert_unchanged(ledger, before, "A token with slot -1 wrote to the {} cache")


@check(
    "L2",
    needs=("multi-token-decode",),
    owned=WRITERS,
    reports=("llama.cpp#25691",),
)
@pytest.mark.parametrize("kind", WITH_ENTRIES)
@pytest.mark.parametrize("accepted", range(6))
def test_rejected_drafts_leave_no_trace(dsv4: Subject, kind: LayerKind, accepted: int) -> None:
    """States survive drafts that are taken back, before, at and behind the end of an entry."""
    prompts = (125, 126, 127, 128, 129, 130)
    limits = Limits(max_tokens=800, max_requests=6, max_model_len=256, max_query_len=130)
    ledger = Ledger(dsv4, case(kind, limits=limits, decode_query_len=6))
    ledger.step((0,) * 6, prompts)
    ledger.step(prompts, (6,) * 6)
    for more in range(accepted, accepted + 8):
        ledger.step(tuple(prompt + more for prompt in prompts), (1,) * 6)
    ledger.check()


@check("L2", core=True, owned=WRITERS, reports=("1Cat-vLLM#162",))
@pytest.mark.parametrize("kind", KINDS)
def test_writing_again_writes_the_same_bytes(dsv4: Subject, kind: LayerKind) -> None:
    """No two threads race for the same bytes: a step that is written twenty times over is the same."""
    ledger = Ledger(dsv4, case(kind))
    step = ledger.step((0,), (290,))
    before = snapshots(ledger)
    for _ in range(20):
        ledger.attention.insert_kv(ledger.projected, ledger.caches, step)
        ledger.attention.compress(ledger.projected, ledger.caches, step)
        assert_unchanged(ledger, before, "The same step leaves another {} cache")


CHUNKS: tuple[tuple[int, ...], ...] = ((290,), (130, 160), (1, 2, 3, 127, 157), (3, *[1] * 9, 278))


@check("L2", core=True, owned=WRITERS, reports=("vllm#49896",))
@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda chunks: f"{len(chunks)}-chunks")
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_write_the_same_rows(dsv4: Subject, kind: LayerKind, chunks: tuple[int, ...]) -> None:
    """A prompt in any chunks leaves the rows of the definition."""
    ledger = Ledger(dsv4, case(kind))
    write_chunks(ledger, chunks)
    ledger.check()


@check("L2", needs=("deterministic",), owned=WRITERS, reports=("1Cat-vLLM#162", "vllm#53257"))
@pytest.mark.parametrize("kind", WITH_ENTRIES)
def test_chunks_write_the_same_bytes(dsv4: Subject, kind: LayerKind) -> None:
    """A prompt in any chunks leaves the same entries and index keys, bit for bit."""
    found = []
    for chunks in CHUNKS:
        ledger = Ledger(dsv4, case(kind, deterministic=True))
        write_chunks(ledger, chunks)
        found.append(snapshots(ledger))
    for chunks, copies in zip(CHUNKS[1:], found[1:], strict=True):
        for name in copies.keys() & {"compressed", "index"}:  # window and state are rings
            assert_same(copies[name], found[0][name], f"Chunks {chunks} leave another {name} cache than one")


def write_chunks(ledger: Ledger, chunks: tuple[int, ...]) -> None:
    """The same projections in these chunks."""
    projected, done = ledger.project(sum(chunks)), 0
    for count in chunks:
        rows = slice(done, done + count)
        parts = {name: None if value is None else value[rows] for name, value in vars(projected).items()}
        ledger.step((done,), (count,), Projected(**parts))  # type: ignore[arg-type]
        done += count


def snapshots(ledger: Ledger) -> dict[str, torch.Tensor]:
    """Copies of a layer's caches."""
    copies = {name: snapshot(cache) for name, cache in vars(ledger.caches).items()}
    return {name: copy for name, copy in copies.items() if copy is not None}


def assert_unchanged(ledger: Ledger, before: dict[str, torch.Tensor], what: str) -> None:
    """Check that caches hold what they held; `what` has a place for a cache's name."""
    for name, copy in snapshots(ledger).items():
        assert_same(copy, before[name], what.format(name))
