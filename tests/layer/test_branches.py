"""Parts of a layer where there are no streams, and which parts they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4core import attention
from dsv4core.api import Limits, Request
from dsv4core.branches import side_by_side
from dsv4core.framework.selection import select
from dsv4core.model.checkpoint import Checkpoint
from dsv4core.stack import AttentionStack, load_layer

CPU = torch.device("cpu")


def test_one_after_the_other() -> None:
    order: list[int] = []

    def branch(number: int) -> int:
        order.append(number)
        return number

    results = side_by_side([lambda own=own: branch(own) for own in range(3)], CPU, 1)
    assert results == order == [0, 1, 2]


@pytest.mark.parametrize("allowed", [False, True])
def test_branches_of_a_layer(allowed: bool, tiny_checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order they give the same; the indexer is the last, which keeps its stream."""
    called: list[int] = []

    def backwards(branches: list[Callable[[], Any]], device: torch.device, tokens: int) -> list[Any]:
        called.append(tokens)
        assert branches[2]() is not None
        return [branch() for branch in reversed(branches)][::-1]

    monkeypatch.setattr(attention, "side_by_side", backwards)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    heads = checkpoint.shape.num_attention_heads
    limits = Limits(max_tokens=12, max_requests=1, max_model_len=64, max_query_len=12)
    selection = select(Request("cpu", "", checkpoint.shape, heads, limits, dtype="float32"), "reference")
    hidden, outputs = torch.randn(12, checkpoint.shape.hidden_size), []
    for branches in (False, allowed):
        plans = {kind: replace(plan, branches=branches) for kind, plan in selection.plans.items()}
        own = replace(selection, plans=plans)
        stack = AttentionStack(own, [load_layer(own, checkpoint, 1, CPU)], CPU)
        outputs.append(stack.attend(stack.layers[0], hidden, stack.plan((0,), (12,)))[0])
    assert torch.equal(*outputs)
    assert called == [12] * allowed
