"""A second stack that is fed the same layer inputs, and how far the first one is from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dsv4core.api.selection import Request
from dsv4core.api.step import Step
from dsv4core.framework.selection import Selection
from dsv4core.stack import AttentionStack
from dsv4core.testing.tolerances import LAYER_OUTPUT, LEAST_AGREEMENT, run_tolerance


@dataclass(frozen=True)
class Verification:
    """How far a run was from the reference.

    Attributes:
        compared_with: What the reference was, for people.
        max_abs_err: Largest difference of an element of a layer's output.
        rel_err: Largest relative error of a layer in a step: norm of the difference over norm of the output.
        tolerance: Most that `rel_err` may be.
        worst_layer: Layer with that error.
        agreement: Share of the reference's choices that the backend's indexer made, too, among queries that
            see more entries than they may choose; None if there are none.
        least_agreement: Least that it may be.
    """

    compared_with: str
    max_abs_err: float
    rel_err: float
    tolerance: float
    worst_layer: int
    agreement: float | None
    least_agreement: float

    @property
    def ok(self) -> bool:
        """Whether the run is within its tolerances. NaN is not."""
        agrees = self.agreement is None or self.agreement >= self.least_agreement
        return self.rel_err <= self.tolerance and agrees


def shadow_request(selection: Selection) -> Request:
    """What the reference computes beside a backend: the same; beside itself: the same with fp32 caches."""
    if selection.backend.name == "reference":
        return replace(selection.request, kv_cache_dtype="fp32", index_dtype="fp32")
    return replace(
        selection.request,
        kv_cache_dtype=selection.layout.window.name,
        index_dtype=selection.layout.index.name.removeprefix("index_"),
    )


class Shadow:
    """The reference, layer by layer beside a backend.

    It attends the entries that the backend chose, so that one disagreement about a near tie is not a large
    error; how often both choose alike is counted by itself.
    """

    def __init__(self, stack: AttentionStack, selection: Selection) -> None:
        self._stack, self._selection = stack, selection
        self._layers = {layer.spec.index: layer for layer in stack.layers}
        self._step: Step
        self._worst = (0.0, 0.0, stack.layers[0].spec.index)  # relative, absolute, layer
        self._chosen = self._shared = 0

    def plan(self, computed: Sequence[int], query: Sequence[int]) -> None:
        """Begin the same step."""
        self._step = self._stack.plan(computed, query)

    def compare(
        self, index: int, hidden: torch.Tensor, out: torch.Tensor, selected: torch.Tensor | None
    ) -> None:
        """Compute layer `index` from the same input and keep the largest error."""
        layer = self._layers[index]
        expected, _ = self._stack.attend(layer, hidden, self._step, selected)
        difference = (out - expected).float()
        relative = float(difference.norm() / expected.float().norm().clamp_min(1e-30))
        absolute = max(self._worst[1], float(difference.abs().max()))
        if relative > self._worst[0] or relative != relative:
            self._worst = (relative, absolute, index)
        else:
            self._worst = (self._worst[0], absolute, self._worst[2])
        if selected is not None:
            self._count_agreement(index, hidden, selected)

    def _count_agreement(self, index: int, hidden: torch.Tensor, selected: torch.Tensor) -> None:
        layer = self._layers[index]
        attention, state = layer.attention, self._stack.kind_state(layer)
        own = attention.select(attention.project(hidden), self._stack.pools.layers[index], self._step, state)
        assert own is not None
        ratio = attention.layer.kind.ratio
        assert ratio is not None
        choosing = (self._step.positions + 1) // ratio > own.shape[1]
        own, selected = own[choosing], selected[choosing]
        if own.numel():
            entries = int(max(own.max(), selected.max())) + 1
            chosen, expected = _membership(selected, entries), _membership(own, entries)
            self._chosen += int(expected.sum())
            self._shared += int((chosen & expected).sum())

    def result(self) -> Verification:
        """The largest errors of all steps so far."""
        window, request = self._selection.layout.window, self._selection.request
        itself = self._selection.backend.name == "reference"
        what = "itself with fp32 caches" if itself else f"the reference with {window.name} caches"
        relative, absolute, layer = self._worst
        return Verification(
            compared_with=what,
            max_abs_err=absolute,
            rel_err=relative,
            tolerance=LAYER_OUTPUT[window.name]
            if itself
            else run_tolerance(request.dtype, self._selection.plans.values()),
            worst_layer=layer,
            agreement=self._shared / self._chosen if self._chosen else None,
            least_agreement=LEAST_AGREEMENT,
        )


def _membership(selected: torch.Tensor, entries: int) -> torch.Tensor:
    """`[tokens, entries]`: whether a query attends an entry."""
    member = torch.zeros(selected.shape[0], entries + 1, dtype=torch.bool, device=selected.device)
    return member.scatter_(1, selected.long() % (entries + 1), True)[:, :entries]
