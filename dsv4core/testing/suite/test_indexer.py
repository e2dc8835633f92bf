"""L3: the indexer's scores and choices, by the backend where it owns them, else by the core for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsv4core import ops
from dsv4core.api import C4A, Limits, Step
from dsv4core.stack import AttentionStack
from dsv4core.testing.compare import assert_rows
from dsv4core.testing.layers import LAYER_MODEL, backend_stack, hidden_states, reference_stack
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite.marks import check
from dsv4core.testing.suite.test_caches import caches_of, write
from dsv4core.testing.tolerances import INDEX_LOGITS, LEAST_AGREEMENT

K = LAYER_MODEL.index_topk
LIMITS = Limits(max_tokens=900, max_requests=2, max_model_len=1000, max_query_len=900)
NAN, INF = float("nan"), float("inf")


def filled(subject: Subject) -> tuple[AttentionStack, AttentionStack]:
    """A layer with an indexer on the backend and on the reference, its caches filled by a prompt of 890."""
    ours = backend_stack(subject, [C4A], LIMITS)
    theirs = reference_stack(ours)
    for stack in (ours, theirs):
        step = stack.plan((0, 0), (890, 7))
        write(stack, theirs.layers[0].attention.project(hidden_states(897, theirs)), step)
    return ours, theirs


def topk(stack: AttentionStack, logits: torch.Tensor, step: Step) -> torch.Tensor:
    """The choice from given logits."""
    own: Callable[..., torch.Tensor] | None = stack.layers[0].attention.bound.index_topk
    return ops.index_topk(logits, K) if own is None else own(logits, step)


@check("L3", core=True, reports=("vllm#40991", "vllm-deepseek-v4-sm89#51"))
def test_index_logits(dsv4: Subject) -> None:
    """Weighted sums of clipped products for every entry that a query sees, minus infinity behind them."""
    ours, theirs = filled(dsv4)
    step = ours.plan((890, 7), (5, 2))
    theirs.plan((890, 7), (5, 2))
    projected = theirs.layers[0].attention.project(hidden_states(7, theirs, seed=1))
    write(ours, projected, step)
    write(theirs, projected, step)
    assert projected.index_q is not None
    assert projected.index_weights is not None
    rope = theirs.layers[0].attention.rope
    dtype = theirs.selection.layout.index.name.removeprefix("index_")
    q, weights = ops.index_query(projected.index_q, projected.index_weights, step.positions, rope, dtype)
    visible = (step.positions + 1) // 4
    keys, table = caches_of(theirs).index, step.compressed[C4A.name]
    assert keys is not None
    expected = ops.index_logits(q, weights, keys, table, step.token_to_request, visible)
    own = ours.layers[0].attention.bound.index_logits
    found = expected if own is None else own(q, weights, caches_of(ours), step)[:, : expected.shape[1]]
    hidden = torch.isneginf(expected)
    assert bool(torch.isneginf(found[hidden]).all()), "An entry that a query does not see has a score."
    rows = (found.masked_fill(hidden, 0), expected.masked_fill(hidden, 0))
    assert_rows(*rows, INDEX_LOGITS, "scores of a query")


@check("L3", core=True, reports=("vllm#49896", "vllm#53257", "vllm#52109", "transformers#45820"))
def test_topk(dsv4: Subject) -> None:
    """Exact: ties go to the lowest entry, NaN and minus infinity are never chosen, -1 fills the rest."""
    ours = backend_stack(dsv4, [C4A], LIMITS)
    step = ours.plan((900, 900), (4, 4))
    logits = torch.randn(8, 226, generator=torch.Generator().manual_seed(0))
    logits[1] = 1.0  # all tie
    logits[2] = logits[2].round()  # many tie
    logits[3] = NAN
    logits[4, ::2] = NAN
    logits[5, 5:] = -INF
    logits[6] = -INF
    logits[7, 17] = INF
    found = topk(ours, logits.to(dsv4.device), step).cpu()
    assert found.dtype == torch.int32, f"Chosen entries are {found.dtype}, and int32 is due."
    for row, scores in enumerate(logits):
        # NaN is not greater than anything.
        best = sorted((-float(score), entry) for entry, score in enumerate(scores) if score > -INF)[:K]
        valid = [entry for _, entry in best]
        chosen = found[row][found[row] >= 0].tolist()
        assert len(set(chosen)) == len(chosen), f"Row {row} names an entry twice."
        assert sorted(chosen) == sorted(valid), f"Row {row} chooses other entries than the {len(valid)} best."
        assert bool((found[row, len(chosen) :] == -1).all()), f"Row {row} has -1 before its last entry."


@check("L3", core=True, reports=("mlx-lm#1189", "pypto-lib#592", "vllm#52109", "vllm#49896"))
@pytest.mark.parametrize("phase", ["decode", "chunk"])
def test_choices(dsv4: Subject, phase: str) -> None:
    """The entries that the layer attends are those of the reference but for near ties, and all visible."""
    computed, query = {"decode": ((890, 7), (1, 1)), "chunk": ((890, 7), (100, 100))}[phase]
    ours, theirs = filled(dsv4)
    hidden = hidden_states(sum(query), theirs, seed=2)
    chosen = []
    for stack in (ours, theirs):
        step, attention = stack.plan(computed, query), stack.layers[0].attention
        projected = theirs.layers[0].attention.project(hidden)
        write(stack, projected, step)
        selected = attention.select(projected, caches_of(stack), step)
        assert selected is not None
        assert tuple(selected.shape) == (step.num_tokens, K)
        chosen.append(selected.cpu())
    shared = total = 0
    for token, position in enumerate(step.positions.tolist()):
        mine, reference = (set(table[token][table[token] >= 0].tolist()) for table in chosen)
        visible = (position + 1) // 4
        assert len(mine) == min(K, visible), f"Token {token} sees {visible} entries and chose {len(mine)}."
        assert max(mine, default=-1) < visible, f"Token {token} chose an entry that it does not see."
        shared, total = shared + len(mine & reference), total + len(reference)
    assert shared >= LEAST_AGREEMENT * total, f"Only {shared} of {total} choices are the reference's."
