"""L3: the indexer's scores and choices, by the backend where it owns them, else by the core for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4core import ops
from dsv4core.api import C4A, Limits, PageSizes, Step
from dsv4core.testing import oracle
from dsv4core.testing.case import Case
from dsv4core.testing.compare import assert_rows
from dsv4core.testing.layers import backend_stack
from dsv4core.testing.ledger import Ledger
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite.marks import check, large
from dsv4core.testing.tolerances import INDEX_LOGITS

K = 128
LIMITS = Limits(max_tokens=1000, max_requests=3, max_model_len=1000, max_query_len=900)
NAN, INF = float("nan"), float("inf")
INDEXER = ("index_logits", "index_topk")


def case(**changes: Any) -> Case:
    """A layer with an indexer that chooses 128 entries, and three requests."""
    return replace(Case(C4A, heads=0, index_topk=K, limits=LIMITS, private_output=True), **changes)


def queried(ledger: Ledger, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """The indexer's queries and weights for the last projections of a step."""
    projected, layout = ledger.projected, ledger.stack.selection.layout
    assert projected.index_q is not None
    assert projected.index_weights is not None
    dtype = layout.index.name.removeprefix("index_")
    return ops.index_query(
        projected.index_q, projected.index_weights, step.positions, ledger.attention.rope, dtype
    )


def logits(
    ledger: Ledger, q: torch.Tensor, weights: torch.Tensor, step: Step, rows: slice = slice(None)
) -> torch.Tensor:
    """Scores of all entries for all queries of a step, or for some of them."""
    own, keys, kind = ledger.attention.bound.index_logits, ledger.caches.index, ledger.case.kind
    assert keys is not None
    assert kind.ratio is not None
    visible = ((step.positions + 1) // kind.ratio)[rows]
    width = kind.visible_entries(step.limits.max_model_len)
    if own is not None:
        found: torch.Tensor = own(
            q[rows], weights[rows], visible, rows, width, ledger.caches, step, ledger.kind_state
        )
        return found
    table, requests = step.compressed[kind.name], step.token_to_request[rows]
    return ops.index_logits(q[rows], weights[rows], keys, table, requests, visible, width)


def assert_logits(found: torch.Tensor, ledger: Ledger, step: Step) -> None:
    """Check scores against the definition, those that a query sees."""
    keys = ledger.caches.index
    assert keys is not None
    scores = oracle.entry_scores(*queried(ledger, step), keys, step, ledger.case.kind)
    most = max((len(own) for own in scores), default=0)
    assert found.dtype == torch.float32, f"Scores are {found.dtype}, and float32 is due."
    assert found.shape[0] == len(scores), f"Scores have {found.shape[0]} rows for {len(scores)} queries."
    assert found.shape[1] >= most, f"A query sees {most} entries, and {found.shape[1]} have scores."
    due = torch.zeros(found.shape, dtype=torch.float64)
    seen = torch.zeros(found.shape, dtype=torch.bool)
    for number, own in enumerate(scores):
        due[number, : len(own)], seen[number, : len(own)] = own, True
    assert_rows(torch.where(seen, found.cpu(), 0.0), due, INDEX_LOGITS, "scores of a query", step)


OTHERS: dict[str, dict[str, Any]] = {
    "64-rows": {},
    "2-rows": {"page_sizes": PageSizes(context=8)},
    "61-rows": {"page_sizes": PageSizes(window=61, context=244, state=3)},
    "256-rows": {"page_sizes": PageSizes(context=1024)},
    "no-lengths-on-the-host": {"host_lengths": False},
}
STEPS = {
    "decode": ((890, 7, 20), (1, 1, 1)),
    "chunk": ((600, 7, 20), (67, 5, 1)),
    "prompts": ((0, 0, 0), (300, 3, 70)),
}


def run(ledger: Ledger, computed: tuple[int, ...], query: tuple[int, ...]) -> Step:
    """A step of requests whose earlier tokens are there already."""
    if any(computed):
        ledger.step((0,) * len(computed), computed)
    return ledger.step(computed, query)


@check("L3", core=True, owned=("index_logits",), reports=("vllm#40991", "vllm-deepseek-v4-sm89#51"))
@pytest.mark.parametrize("phase", STEPS)
def test_index_logits(dsv4: Subject, phase: str) -> None:
    """Weighted sums of clipped products for every entry that a query sees."""
    ledger = Ledger(dsv4, case())
    step = run(ledger, *STEPS[phase])
    assert_logits(logits(ledger, *queried(ledger, step), step), ledger, step)


@check("L3", owned=("index_logits",))
def test_index_logits_of_some_tokens(dsv4: Subject) -> None:
    """A part of a step's queries: those of the second request, and some of the first one's."""
    ledger = Ledger(dsv4, case())
    step = run(ledger, *STEPS["chunk"])
    q, weights = queried(ledger, step)
    rows, scores = slice(40, 71), logits(ledger, q, weights, step)
    scores[rows] = logits(ledger, q, weights, step, rows)
    assert_logits(scores, ledger, step)


@check("L3", owned=("index_logits",), reports=("vllm#40991", "vllm#55526"))
@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_index_logits_elsewhere(dsv4: Subject, changes: dict[str, Any]) -> None:
    """The same with other pages and hosts."""
    ledger = Ledger(dsv4, case(**changes))
    step = run(ledger, *STEPS["chunk"])
    assert_logits(logits(ledger, *queried(ledger, step), step), ledger, step)


@check("L3", needs=("strided-pages",), owned=("index_logits",), reports=("vllm#47783", "flashinfer#3856"))
def test_index_logits_of_strided_pages(dsv4: Subject) -> None:
    """Index pages that are followed by bytes of something else."""
    ledger = Ledger(dsv4, case(page_gap=3))
    step = run(ledger, *STEPS["chunk"])
    assert_logits(logits(ledger, *queried(ledger, step), step), ledger, step)


@large
@check("L3", owned=("index_logits",), reports=("vllm#55184",))
def test_index_logits_beyond_two_gib(dsv4: Subject) -> None:
    """Offsets in bytes take more than 32 bits."""
    limits = replace(LIMITS, max_tokens=270, max_requests=1, max_model_len=300)
    ledger = Ledger(dsv4, case(spare_pages=(1 << 31) // (64 * 132) + 8, limits=limits, poison=None))
    step = run(ledger, (250,), (7,))
    assert_logits(logits(ledger, *queried(ledger, step), step), ledger, step)


@check("L3", core=True, owned=("index_topk",), reports=("vllm#49896", "vllm#53257", "vllm#52109"))
@pytest.mark.parametrize(("k", "entries"), [(128, 226), (512, 511), (512, 512), (512, 513), (1024, 1025)])
def test_topk(dsv4: Subject, k: int, entries: int) -> None:
    """Exact: ties go to the lowest entry, NaN and minus infinity are never chosen, -1 fills the rest.

    What lies behind a query's entries is the best of all, and not its.
    """
    limits = Limits(max_tokens=9, max_requests=3, max_model_len=4 * entries + 3, max_query_len=3)
    stack = backend_stack(dsv4, case(index_topk=k, limits=limits))
    step = stack.plan((4 * entries,) * 3, (3, 3, 3))  # each of them sees all entries, and no more
    rows = torch.randn(9, entries, generator=torch.Generator().manual_seed(0))
    rows[1] = 1.0  # all tie
    rows[2] = rows[2].round()  # many tie
    rows[3] = NAN
    rows[4, ::2] = NAN
    rows[5, 5:] = -INF
    rows[6] = -INF
    rows[7, 17] = INF
    own, wide = stack.layers[0].attention.bound.index_topk, torch.full((9, entries + 7), INF)
    wide[:, :entries] = rows
    wide, visible = wide.to(dsv4.device), (step.positions + 1) // 4
    found = (ops.index_topk(wide, visible, k) if own is None else own(wide, visible, step)).cpu()
    assert found.dtype == torch.int32, f"Chosen entries are {found.dtype}, and int32 is due."
    assert tuple(found.shape) == (9, k), f"The table is {list(found.shape)}, and {[9, k]} is due."
    for row, scores in enumerate(rows):
        due = oracle.best_entries(scores.tolist(), k)
        chosen = found[row][found[row] >= 0].tolist()
        assert len(set(chosen)) == len(chosen), f"Row {row} names an entry twice."
        assert sorted(chosen) == due, f"Row {row} chooses other entries than the {len(due)} best."
        assert bool((found[row, len(chosen) :] == -1).all()), f"Row {row} has -1 before its last entry."


@check("L3", core=True, owned=INDEXER, reports=("mlx-lm#1189", "pypto-lib#592", "transformers#45820"))
@pytest.mark.parametrize("phase", STEPS)
def test_choices(dsv4: Subject, phase: str) -> None:
    """A layer attends the best of the entries that each query sees, but for near ties, and no others."""
    ledger = Ledger(dsv4, case())
    step = run(ledger, *STEPS[phase])
    assert_choices(ledger.select(step), ledger, step)


@check("L3", core=True, owned=INDEXER, reports=("vllm#52109",))
def test_choices_where_the_widths_meet(dsv4: Subject) -> None:
    """Queries that see just as many entries as are chosen, and one less and more."""
    prompts = tuple(4 * entries + odd for entries, odd in ((127, 3), (128, 0), (128, 3), (129, 0)))
    limits = Limits(max_tokens=2100, max_requests=4, max_model_len=600, max_query_len=600)
    ledger = Ledger(dsv4, case(limits=limits))
    ledger.step((0,) * 4, tuple(prompt - 1 for prompt in prompts))
    step = ledger.step(tuple(prompt - 1 for prompt in prompts), (1,) * 4)
    assert_choices(ledger.select(step), ledger, step)


def assert_choices(selected: torch.Tensor | None, ledger: Ledger, step: Step) -> None:
    """Check what was chosen for each token against the definition's scores."""
    assert selected is not None
    k, keys = ledger.case.index_topk, ledger.caches.index
    assert keys is not None
    shape = tuple(selected.shape)
    assert shape == (step.num_tokens, k), f"The table is {list(shape)}, and {[step.num_tokens, k]} is due."
    all_scores = oracle.entry_scores(*queried(ledger, step), keys, step, ledger.case.kind)
    for token, (row, scores) in enumerate(zip(selected.cpu(), all_scores, strict=True)):
        chosen, due = row[row >= 0].tolist(), oracle.best_entries(scores.tolist(), k)
        assert len(set(chosen)) == len(chosen), f"Token {token} attends an entry twice."
        assert len(chosen) == len(due), f"Token {token} sees {len(scores)} entries and chose {len(chosen)}."
        if not due:
            continue
        assert max(chosen) < len(scores), f"Token {token} chose an entry that it does not see."
        near = 8 * INDEX_LOGITS * float(scores.square().mean().sqrt())
        worst = float(scores[due].min()) - float(scores[chosen].min())
        assert worst <= near, f"Token {token} chose an entry that is {worst:.3g} worse than its {k} best."
