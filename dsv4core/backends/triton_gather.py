"""Prefill over gathered rows: each request's rows are decoded once, and its queries attend them in bf16.

To read rows in place is to decode one for every query that attends it, which takes no memory. This decodes
all rows that a request sees once, and takes room for them: which is faster depends on chips and contexts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4core.api.errors import DSV4Error
from dsv4core.api.kvcache import round_up
from dsv4core.api.layer import LayerCaches
from dsv4core.api.model import LayerKind
from dsv4core.api.selection import Request
from dsv4core.api.step import CacheTable, Step
from dsv4core.kvcache import KVCache, cache_layout
from dsv4core.model.shapes import ModelShape
from dsv4core.ops import triton as kernels
from dsv4core.ops.sparse_mla import Rows
from dsv4core.ops.sparse_mla.schedule_triton import Schedule, Table, schedule
from dsv4core.step import gather_area, plan_gather

PAGE = 64
"""Rows a page of a workspace: any number would do, and attention is compiled for each."""
ALIGNED = 16
"""Rows of a request are a multiple of it, or kernels would be compiled for whatever its divisors are."""


@dataclass(frozen=True, eq=False)
class Side:
    """What a chunk has of one pool.

    Attributes:
        table: Where the requests' rows lie.
        first: `[requests]`: each one's first row that is gathered.
        count: `[requests]`: how many are.
        height: Rows of the workspace for each request.
    """

    table: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    height: int

    @classmethod
    def of(cls, table: torch.Tensor, first: torch.Tensor, count: torch.Tensor, height: int) -> Side:
        """A height is rounded up."""
        return cls(table, first, count, round_up(max(height, 1), ALIGNED))

    def gather(self, cache: KVCache, model: ModelShape, dtype: torch.dtype) -> KVCache:
        """A workspace of decoded rows, as attention reads them."""
        requests, width = len(self.first), model.head_dim
        pages = -(-requests * self.height // PAGE)
        pool = torch.empty(pages, PAGE, width, dtype=dtype, device=self.first.device)
        rows = pool.flatten(0, 1)[: requests * self.height].unflatten(0, (requests, self.height))
        kernels.gather_rows(cache, self.table, self.first, self.count, rows)
        return KVCache(pool, cache_layout(model, _format(dtype), "fp8").window)


def _format(dtype: torch.dtype) -> str:
    return "fp32" if dtype == torch.float32 else "bf16"


@dataclass(frozen=True, eq=False)
class Chunk:
    """Requests whose rows are gathered together.

    Attributes:
        tokens: Their query tokens.
        requests: `[tokens]` int32: each one's request within the chunk.
        places: `[requests, 1]` int32: each request's part of a workspace.
        window: Their window tokens.
        window_slots: `[tokens, window]` int32 rows of the window's workspace.
        entries: Their compressed entries, None without a compressor.
        entry_slots: `[requests, height]` int32 rows of all entries, None where queries choose some.
        visible: `[tokens]`: entries that each query sees, None without a compressor.
        division: Of their attention.
    """

    tokens: slice
    requests: torch.Tensor
    places: torch.Tensor
    window: Side
    window_slots: torch.Tensor
    entries: Side | None
    entry_slots: torch.Tensor | None
    visible: torch.Tensor | None
    division: Schedule

    def rows(
        self, caches: LayerCaches, selected: torch.Tensor | None, model: ModelShape, dtype: torch.dtype
    ) -> list[Rows]:
        """Gather what the chunk's queries attend in one layer.

        Args:
            caches: The layer's caches.
            selected: `[tokens, k]` entries that each query of the step attends; None for all of them.
            model: The model's sizes.
            dtype: Of the queries, as they are attended.
        """
        rows = [Rows(self.window.gather(caches.window, model, dtype), self.window_slots)]
        if self.entries is None or caches.compressed is None:
            return rows
        cache = self.entries.gather(caches.compressed, model, dtype)
        if self.entry_slots is not None:
            return [*rows, Rows(cache, self.entry_slots, self.visible, self.requests)]
        assert selected is not None
        slots = kernels.entry_slots(selected[self.tokens], self.requests, self.places, self.entries.height)
        return [*rows, Rows(cache, slots, self.visible)]


def gather_chunks(step: Step, kind: LayerKind, request: Request) -> Iterator[Chunk]:
    """The prefills of a step, in chunks that fit a workspace.

    Raises:
        DSV4Error: The host gives no lengths.
    """
    if step.host_lengths is None:
        raise DSV4Error(
            "backend.prefill=gather was asked to plan a step without lengths; give Step.host_lengths, as the "
            "request says, or set backend.prefill=in_place."
        )
    window, decodes, begin = request.model.sliding_window, step.num_decode_requests, step.num_decode_tokens
    query = step.host_lengths.query[decodes:]
    # A request without queries attends nothing, however long it is.
    total = [own if new else 0 for new, own in zip(query, step.host_lengths.total[decodes:], strict=True)]
    for plan in plan_gather(query, total, kind, window, gather_area(kind, step.limits, window)):
        tokens = slice(begin, begin := begin + sum(query[plan.first : plan.end]))
        if tokens.start < tokens.stop:
            own = slice(decodes + plan.first, decodes + plan.end)
            yield _chunk(step, kind, request, tokens, own, plan.rows - plan.entries, plan.entries)


def _chunk(
    step: Step, kind: LayerKind, request: Request, tokens: slice, own: slice, height: int, entries: int
) -> Chunk:
    """A chunk of the requests `own`; `height` window tokens and `entries` are most of one of them."""
    window = request.model.sliding_window
    lengths, fresh = step.seq_lens[own], step.query_start_loc.diff()[own]
    count = torch.where(fresh > 0, fresh + (lengths - fresh).clamp_max(window - 1), 0)
    side = Side.of(step.window.block_table[own], lengths - count, count, height)
    requests = step.token_to_request[tokens] - own.start
    places = torch.arange(own.stop - own.start, dtype=torch.int32, device=requests.device)[:, None]
    positions = step.positions[tokens]
    slots = kernels.window_slots(
        positions - side.first[requests.long()], requests, places, side.height, window
    )
    tables: list[Table] = [(window, None)]
    compressed = every = visible = None
    if kind.ratio is not None:
        table: CacheTable = step.compressed[kind.name]
        known = torch.where(fresh > 0, lengths // kind.ratio, 0)
        compressed = Side.of(table.block_table[own], torch.zeros_like(known), known, entries)
        visible, size = (positions + 1) // kind.ratio, compressed.height
        if kind.select == "all":
            every = kernels.visible_slots(known, places[:, 0], places, size, size)
        tables.append((size if kind.select == "all" else request.model.index_topk, visible))
    dtype = getattr(torch, request.dtype)
    division = schedule(
        *(len(positions), request.num_heads, tables, {(_format(dtype), None)}, dtype, positions.device)
    )
    return Chunk(tokens, requests, places, side, slots, compressed, every, visible, division)
