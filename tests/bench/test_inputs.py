"""Inputs that a cache does not hold, and steps that do not overwrite themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4core.api import Request, Step
from dsv4core.bench.cost import costs
from dsv4core.bench.inputs import Inputs, Turn
from dsv4core.bench.operations import measured
from dsv4core.bench.workload import KINDS, Workload
from dsv4core.framework.selection import select
from dsv4core.model.shapes import PRESETS

CACHE = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4core.bench.inputs.cache_bytes", lambda device: CACHE)
    monkeypatch.setattr("dsv4core.bench.inputs.MOST_TURNS", {"cpu": 32})


def inputs(workload: Workload) -> Inputs:
    request = Request("cpu", "", PRESETS["tiny"], 16, workload.limits)
    return Inputs(select(request, "reference"), workload, torch.device("cpu"))


@pytest.mark.parametrize(("tokens", "turns"), [(1, 15), (4, 4), (64, 2)])
def test_a_round_moves_twice_the_cache(tokens: int, turns: int) -> None:
    own = inputs(Workload("decode", KINDS["c4a"], tokens, 4096))
    calls = measured("forward_mqa", own).calls
    assert len(calls) == turns
    touched = costs(own.spec, own.selection.layout, own.workload, "bfloat16")["forward_mqa"].bytes
    assert len(calls) * touched >= 2 * CACHE
    assert turns == 2 or (len(calls) - 1) * touched < 2 * CACHE


def test_a_round_has_an_end() -> None:
    own = inputs(Workload("decode", KINDS["swa"], 1, 700))
    assert len(measured("plan_step", own).calls) == 32


def test_turns_and_weights_are_shared_by_operations() -> None:
    own = inputs(Workload("decode", KINDS["c4a"], 1, 700))
    few, many = own.turns("layer"), own.turns("forward_mqa")
    assert len(few) < len(many)
    assert all(one is other for one, other in zip(few, many, strict=False))
    assert own.weights(3)[:2] == own.weights(2)


def test_memory_ends_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inputs, "_has_room", lambda self: len(self._turns) < 5)
    assert len(inputs(Workload("decode", KINDS["c4a"], 1, 700)).turns("forward_mqa")) == 5


@pytest.mark.parametrize("kind", list(KINDS))
def test_pages_of_a_step_are_different(kind: str) -> None:
    for turn in inputs(Workload("decode", KINDS[kind], 3, 1400)).turns("forward_mqa"):
        for table in (turn.step.window, *turn.step.compressed.values()):
            assert table.block_table.unique().numel() == table.block_table.numel()


@pytest.mark.parametrize("operation", ["forward_mqa.step", "layer.step"])
def test_layers_share_a_plan(operation: str) -> None:
    """One plan a step, then each layer on rows of its own."""
    own = inputs(Workload("decode", KINDS["swa"], 2, 300, layers=3))
    planned: list[Step] = []

    def watched(turn: Turn) -> Turn:
        def plan_step(step: Step) -> None:
            planned.append(step)
            turn.kind.plan_step(step)

        return replace(turn, kind=replace(turn.kind, plan_step=plan_step))

    own._turns = [watched(turn) for turn in own.turns(operation)]
    calls = measured(operation, own).calls
    assert len(calls) % 3 == 0
    outputs = [call() for call in calls[:3]]
    assert len(planned) == 1
    if operation == "forward_mqa.step":
        first, second, third = (output.data for output in outputs)
        assert not torch.equal(first, second)
        assert not torch.equal(second, third)
