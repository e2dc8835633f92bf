"""A layer's caches, and the account of what its steps ought to have written there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4core.api import Step
from dsv4core.attention import Projected
from dsv4core.kvcache import KVCache
from dsv4core.kvcache.codecs import decode_rows, encode_rows
from dsv4core.testing import oracle
from dsv4core.testing.case import Case
from dsv4core.testing.compare import assert_rows
from dsv4core.testing.layers import backend_stack, caches_of, weights_of
from dsv4core.testing.subject import Subject
from dsv4core.testing.tolerances import ATTENTION, CACHED_ROW

COMPRESSORS = {"compressed": "compressor", "index": "indexer.compressor"}
"""The prefix of a compressor's weights by the cache that it fills."""


@dataclass(eq=False)
class _History:
    """A request's values and scores by position, `[max_model_len, groups * width]` fp64 on the CPU."""

    values: torch.Tensor
    scores: torch.Tensor


@dataclass(eq=False)
class Account:
    """The rows that one cache ought to hold, by slot; all others are poison."""

    rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def enter(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows of a step, `[tokens, width]` at `[tokens]` slots; those at -1 are not stored."""
        for slot, row in zip(slots.tolist(), rows, strict=True):
            if slot >= 0:
                self.rows[slot] = row

    def check(self, cache: KVCache, poison: int | None, name: str) -> None:
        """Compare a cache with the account, each part of a row by itself, and its other bytes with poison.

        Raises:
            AssertionError: A row is off, or something else was written.
        """
        slots = torch.tensor(sorted(self.rows), dtype=torch.long)
        if slots.numel():
            due = torch.stack([self.rows[slot] for slot in slots.tolist()])
            found, due = cache.read(slots.to(cache.pool.device)).cpu(), _stored(cache, due)
            parts = [part for part in cache.format.parts if part.name != "scale"]
            widths = [part.width for part in parts]
            for part, own, other in zip(parts, found.split(widths, -1), due.split(widths, -1), strict=True):
                what = f"{part.name} part of rows of the {name} cache"
                assert_rows(own[:, None], other[:, None], CACHED_ROW[part.dtype], what, floor=0.0)
        if poison is not None:
            other = _without(cache, slots) != poison
            changed = int(other.sum())
            assert not changed, f"{changed} bytes of the {name} cache changed that no row has."


def _stored(cache: KVCache, rows: torch.Tensor) -> torch.Tensor:
    """Rows as the cache's format holds them."""
    scale = None if cache.scale is None else cache.scale.cpu()
    return decode_rows(cache.format, encode_rows(cache.format, rows.float(), scale), scale)


def _without(cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
    """The bytes of a pool's memory, what lies between its pages included, without those of some rows."""
    storage = cache.pool.untyped_storage()
    every = torch.empty(0, dtype=torch.uint8, device=cache.pool.device).set_(storage)
    beside = torch.ones_like(every, dtype=torch.bool)
    page, offset = slots // cache.page_size, slots % cache.page_size
    for view in cache.regions:
        region = beside.as_strided(view.shape, view.stride(), view.storage_offset())
        region[page.to(every.device), offset.to(every.device)] = False
    return every[beside]


class Ledger:
    """One layer on the backend, given random projections, and an account of each of its caches."""

    def __init__(self, subject: Subject, case: Case, seed: int = 0) -> None:
        """Build the layer, its caches full of poison.

        Raises:
            Refused: The backend cannot run the case.
        """
        self.case = case = case.settled(subject)
        self.stack = backend_stack(subject, case)
        self.attention = self.stack.layers[0].attention
        self.plan = self.stack.selection.plans[case.kind.name]
        self.caches = caches_of(self.stack)
        self.weights = weights_of(case.model, 0)
        self.random = torch.Generator().manual_seed(seed)
        self.accounts: defaultdict[str, Account] = defaultdict(Account)
        self._histories: dict[tuple[str, int], _History] = {}

    def project(self, tokens: int, factor: float = 1.0) -> Projected:
        """Random projections of that size, scores apart."""
        model, kind, dtype = self.case.model, self.case.kind, self.stack.selection.request.dtype

        def normal(*size: int, dtype: str = dtype) -> torch.Tensor:
            values = torch.randn(tokens, *size, generator=self.random)
            return values.to(self.stack.layers[0].norm.device, getattr(torch, dtype))

        def entry(width: int) -> torch.Tensor:
            values, scores = (normal(kind.groups * width, dtype="float32") for _ in range(2))
            return torch.cat([values * factor, scores * 4], dim=-1)

        q, kv = normal(self.case.heads, model.head_dim) * factor, normal(model.head_dim) * factor
        if kind.ratio is None:
            return Projected(q, kv)
        if kind.select != "top_k":
            return Projected(q, kv, entry(model.head_dim))
        index_q = normal(model.index_n_heads, model.index_head_dim)
        entries = entry(model.head_dim), entry(model.index_head_dim)
        return Projected(q, kv, *entries, index_q, normal(model.index_n_heads))

    @property
    def kind_state(self) -> Any:
        """What the layers of its kind share in the step that was planned last."""
        return self.stack.kind_state(self.stack.layers[0])

    def select(self, step: Step) -> torch.Tensor | None:
        """The entries that the layer chooses for the last step."""
        return self.attention.select(self.projected, self.caches, step, self.kind_state)

    def step(
        self, computed: tuple[int, ...], query: tuple[int, ...], projected: Projected | None = None
    ) -> Step:
        """Write one step, and enter it into the accounts; keeps the step's projections and q."""
        step = self.stack.plan(computed, query)
        self.write(step, self.project(sum(query)) if projected is None else projected)
        return step

    def write(self, step: Step, projected: Projected) -> None:
        """What the layer does before it attends, and its entries in the accounts."""
        self.projected, self.q = projected, self.attention.insert_kv(projected, self.caches, step)
        self.attention.compress(projected, self.caches, step)
        self.enter(step, projected)

    def enter(self, step: Step, projected: Projected) -> None:
        """Enter what a step ought to write."""
        rows = oracle.keys(projected.kv, step.positions, self.attention.rope)
        self.accounts["window"].enter(step.window.slot_mapping, rows)
        for target, entry in {"compressed": projected.entry, "index": projected.index_entry}.items():
            if entry is not None:
                self._enter_entries(step, entry, target)

    def check(self) -> None:
        """Compare all caches with their accounts.

        Raises:
            AssertionError: Something was not written as it ought to be, or ought not to be written.
        """
        for name, cache in vars(self.caches).items():
            if cache is not None:
                self.accounts[name].check(cache, self.case.poison, name)

    def check_queries(self, step: Step) -> None:
        """Compare the last step's q with the definition.

        Raises:
            AssertionError: A row is off, its dtype is another, or a padded head is not exactly zero.
        """
        heads, dtype, eps = self.case.heads, self.plan.q_dtype, self.case.model.rms_norm_eps
        assert self.q.dtype == getattr(torch, dtype), (
            f"q has dtype {self.q.dtype}, and the plan says {dtype}."
        )
        due = oracle.queries(self.projected.q, step.positions, self.attention.rope, eps)
        due = due / (self.case.scales.q if self.q.itemsize == 1 else 1.0)
        found = self.q[:, :heads].float()
        if self.q.itemsize == 1:  # what is below its normal numbers has no digits left
            normal = (due.square().mean(-1) >= 2.0**-12).to(found.device)
            found, due = found[normal], due[normal.cpu()].to(self.q.dtype)
            assert_rows(found, due.double(), CACHED_ROW[dtype], "query", floor=0.0)
        else:
            assert_rows(found, due, ATTENTION[dtype], "query", step, floor=0.0)
        padded = self.q[:, heads:].float()
        assert padded.shape[1] == self.plan.padded_q_heads - heads
        assert bool((padded == 0).all()), "Padded heads of q are not exact zeros."

    def _enter_entries(self, step: Step, projected: torch.Tensor, target: str) -> None:
        kind, prefix = self.case.kind, COMPRESSORS[target]
        assert kind.ratio is not None
        positions, requests = step.positions.cpu(), step.token_to_request.cpu()
        values, scores = projected.cpu().double().chunk(2, dim=-1)
        scores = scores + self.weights[f"{prefix}.ape"].data.double()[positions % kind.ratio]
        for request in requests.unique().tolist():
            history, own = self._history(target, request, values.shape[1]), requests == request
            history.values[positions[own]], history.scores[positions[own]] = values[own], scores[own]
        slots = step.compressed[kind.name].slot_mapping.cpu()
        for token in (slots >= 0).nonzero().flatten().tolist():
            history = self._history(target, int(requests[token]), values.shape[1])
            row = self._entry(history, f"{prefix}.norm", int(positions[token]) // kind.ratio)
            self.accounts[target].rows[int(slots[token])] = row
        states = "state" if target == "compressed" else "index_state"
        self.accounts[states].enter(step.state[kind.name].slot_mapping, torch.cat([values, scores], dim=-1))

    def _entry(self, history: _History, norm: str, number: int) -> torch.Tensor:
        return oracle.entry(
            history.values,
            history.scores,
            self.weights[norm].data,
            self.attention.rope,
            self.case.model.rms_norm_eps,
            self.case.kind,
            number,
        )

    def _history(self, target: str, request: int, width: int) -> _History:
        if (target, request) not in self._histories:
            empty = torch.full((self.case.limits.max_model_len, width), float("nan"), dtype=torch.float64)
            self._histories[target, request] = _History(empty, empty.clone())
        return self._histories[target, request]
