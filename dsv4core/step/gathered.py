"""Prefills over gathered rows: what each request's queries see is decoded once, then attended in bf16.

Kernels of libraries attend a `Chunk` as it is, one pool of plain rows. The core's own kernel attends two
workspaces of the same requests (`dsv4core.backends.triton_gather`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import torch

from dsv4core.api.layer import LayerCaches
from dsv4core.api.model import LayerKind
from dsv4core.api.selection import Request
from dsv4core.api.step import Step
from dsv4core.step.gather import gather_area, plan_gather

Attended = TypeVar("Attended")

TABLE = 1 << 24
"""Most places of an index table: 64 MB. A prefill that attends all entries takes its queries in turns."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Requests whose rows are gathered together, each one's entries in front of its window tokens.

    Attributes:
        tokens: Their query tokens.
        positions: Of these, `[tokens]` int64.
        requests: `[tokens]` int32: each one's request within the chunk.
        window_pages: `[requests, pages]`: their pages of window rows.
        first: `[requests]`: each one's first window token that is gathered.
        count: `[requests]`: how many are.
        entry_pages: The same of entries; None without a compressor.
        known: `[requests]`: entries of each; None without a compressor.
        visible: `[tokens]`: entries that each query sees; None without a compressor.
        entries: Rows for entries of each request.
        rows: Rows of each request.
    """

    tokens: slice
    positions: torch.Tensor
    requests: torch.Tensor
    window_pages: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    entry_pages: torch.Tensor | None
    known: torch.Tensor | None
    visible: torch.Tensor | None
    entries: int
    rows: int

    def gather(self, caches: LayerCaches, width: int, operations: ModuleType) -> torch.Tensor:
        """`[requests * rows, width]` bf16. What is in no table is not initialised."""
        size = (len(self.first), self.rows, width)
        workspace = torch.empty(size, dtype=torch.bfloat16, device=self.first.device)
        if self.entry_pages is not None and self.entries:
            nothing, entries = torch.zeros_like(self.first), workspace[:, : self.entries]
            operations.gather_rows(caches.compressed, self.entry_pages, nothing, self.known, entries)
        window = workspace[:, self.entries :]
        operations.gather_rows(caches.window, self.window_pages, self.first, self.count, window)
        return workspace.flatten(0, 1)

    def attend(
        self,
        q: torch.Tensor,
        caches: LayerCaches,
        selected: torch.Tensor | None,
        window: int,
        kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Attended],
        operations: ModuleType,
    ) -> Iterator[tuple[slice, Attended]]:
        """Attend for queries `[tokens, heads, 512]` of the step, some at a time.

        Args:
            q: All queries of the step.
            caches: The layer's caches.
            selected: `[tokens, k]` entries that each query of the step attends; None for all of them.
            window: Raw tokens that a query sees.
            kernel: Attends queries over rows `[rows, 512]` bf16, by a table `[tokens, width]` int32 of their
                numbers, -1 behind the columns that `[tokens]` int32 lengths say are looked at.
            operations: `dsv4core.ops` or `dsv4core.ops.triton`.

        Yields:
            Which of the step's tokens, and what the kernel gave for them.
        """
        rows = self.gather(caches, q.shape[2], operations)
        chosen = self.entries if selected is None else selected.shape[1]
        turn = max(1, TABLE // (window + chosen + 128))
        count = self.tokens.stop - self.tokens.start
        for begin in range(0, count, turn):
            own = slice(begin, min(begin + turn, count))
            tokens = slice(self.tokens.start + own.start, self.tokens.start + own.stop)
            table, lengths = operations.gathered_indices(
                None if selected is None else selected[tokens],
                self.positions[own],
                self.requests[own],
                self.first,
                self.entries,
                self.rows,
                window,
                None if self.visible is None else self.visible[own],
            )
            yield tokens, kernel(q[tokens], rows, table, lengths)


def chunks(step: Step, kind: LayerKind, request: Request) -> Iterator[Chunk]:
    """The prefills of a step whose lengths the host knows, in chunks that fit a workspace."""
    assert step.host_lengths is not None  # callers read rows in place where there are none
    window, decodes, begin = request.model.sliding_window, step.num_decode_requests, step.num_decode_tokens
    query = step.host_lengths.query[decodes:]
    # A request without queries attends nothing, however long it is.
    total = [own if new else 0 for new, own in zip(query, step.host_lengths.total[decodes:], strict=True)]
    for plan in plan_gather(query, total, kind, window, gather_area(kind, step.limits, window)):
        tokens = slice(begin, begin := begin + sum(query[plan.first : plan.end]))
        if tokens.start < tokens.stop:
            own = slice(decodes + plan.first, decodes + plan.end)
            yield _chunk(step, kind, window, tokens, own, plan.entries, plan.rows)


def _chunk(
    step: Step, kind: LayerKind, window: int, tokens: slice, own: slice, entries: int, rows: int
) -> Chunk:
    """A chunk of the requests `own`."""
    lengths, fresh = step.seq_lens[own], step.query_start_loc.diff()[own]
    count = torch.where(fresh > 0, fresh + (lengths - fresh).clamp_max(window - 1), 0)
    positions = step.positions[tokens]
    pages = known = visible = None
    if kind.ratio is not None:
        pages = step.compressed[kind.name].block_table[own]
        known = torch.where(fresh > 0, lengths // kind.ratio, 0)
        visible = (positions + 1) // kind.ratio
    return Chunk(
        tokens,
        positions,
        step.token_to_request[tokens] - own.start,
        step.window.block_table[own],
        lengths - count,
        count,
        pages,
        known,
        visible,
        entries,
        rows,
    )
