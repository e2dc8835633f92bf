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
from dsv4core.api.step import Step
from dsv4core.kvcache import KVCache, cache_layout
from dsv4core.model.shapes import ModelShape
from dsv4core.ops import triton as kernels
from dsv4core.ops.sparse_mla import Rows
from dsv4core.ops.sparse_mla.schedule_triton import Schedule, Table, schedule
from dsv4core.step import gathered
from dsv4core.step.gathered import chunks

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
    for chunk in chunks(step, kind, request):
        yield _chunk(chunk, kind, request)


def _chunk(chunk: gathered.Chunk, kind: LayerKind, request: Request) -> Chunk:
    """The workspaces of a chunk."""
    window, positions, requests = request.model.sliding_window, chunk.positions, chunk.requests
    side = Side.of(chunk.window_pages, chunk.first, chunk.count, chunk.rows - chunk.entries)
    places = torch.arange(len(chunk.first), dtype=torch.int32, device=requests.device)[:, None]
    slots = kernels.window_slots(
        positions - side.first[requests.long()], requests, places, side.height, window
    )
    tables: list[Table] = [(window, None)]
    compressed = every = None
    if chunk.entry_pages is not None and chunk.known is not None:
        known = chunk.known
        compressed = Side.of(chunk.entry_pages, torch.zeros_like(known), known, chunk.entries)
        size = compressed.height
        if kind.select == "all":
            every = kernels.visible_slots(known, places[:, 0], places, size, size)
        tables.append((size if kind.select == "all" else request.model.index_topk, chunk.visible))
    dtype = getattr(torch, request.dtype)
    division = schedule(
        *(len(positions), request.num_heads, tables, {(_format(dtype), None)}, dtype, positions.device)
    )
    return Chunk(*(chunk.tokens, requests, places, side, slots, compressed, every, chunk.visible, division))
