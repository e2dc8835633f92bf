"""Prefill over gathered rows: each request's rows are decoded once, and its queries attend them in bf16.

To read rows in place is to decode one for every query that attends it, which takes no memory. This decodes
all rows that a request sees once, and takes room for them: which is faster depends on chips and contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dsv4core.api.layer import LayerCaches
from dsv4core.api.model import LayerKind
from dsv4core.api.step import CacheTable, Step
from dsv4core.kvcache import KVCache, cache_layout
from dsv4core.model.shapes import ModelShape
from dsv4core.ops import triton as kernels
from dsv4core.ops.sparse_mla import Rows
from dsv4core.step import gather_area, plan_gather

PAGE = 64
"""Rows a page of a workspace, which has no pages: attention is compiled for it."""


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

    def gather(self, cache: KVCache, model: ModelShape, dtype: torch.dtype) -> KVCache:
        """A workspace of decoded rows, as attention reads them."""
        rows = -(-len(self.first) * self.height // PAGE) * PAGE
        decoded = kernels.gather_rows(
            *(cache, self.table, self.first, self.count, self.height, model.head_dim, dtype), rows
        )
        plain = cache_layout(model, "fp32" if dtype == torch.float32 else "bf16", "fp8").window
        return KVCache(decoded.view(-1, PAGE, model.head_dim), plain)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Requests whose rows are gathered together.

    Attributes:
        tokens: Their query tokens.
        requests: `[tokens]` int32: each one's request within the chunk.
        window: Their window tokens.
        window_slots: `[tokens, window]` int32 rows of the window's workspace.
        entries: Their compressed entries, None without a compressor.
        places: `[requests, 1]` int32: each one's part of a workspace.
    """

    tokens: slice
    requests: torch.Tensor
    window: Side
    window_slots: torch.Tensor
    entries: Side | None
    places: torch.Tensor


def gather_chunks(step: Step, kind: LayerKind, window: int) -> Iterator[Chunk]:
    """The prefills of a step whose lengths the host knows, in chunks that fit a workspace."""
    assert step.host_lengths is not None
    decodes, begin = step.num_decode_requests, step.num_decode_tokens
    query, total = (own[decodes:] for own in (step.host_lengths.query, step.host_lengths.total))
    fresh = step.query_start_loc.diff()
    for plan in plan_gather(query, total, kind, window, gather_area(kind, step.limits, window)):
        own = slice(decodes + plan.first, decodes + plan.end)
        tokens = slice(begin, begin := begin + sum(query[plan.first : plan.end]))
        requests = step.token_to_request[tokens] - own.start
        places = torch.arange(plan.end - plan.first, dtype=torch.int32, device=requests.device)[:, None]
        lengths = step.seq_lens[own]
        count = fresh[own] + (lengths - fresh[own]).clamp_max(window - 1)
        side = Side(step.window.block_table[own], lengths - count, count, plan.rows - plan.entries)
        slots = kernels.window_slots(
            step.positions[tokens] - side.first[requests.long()], requests, places, side.height, window
        )
        entries = None
        if kind.ratio is not None:
            table: CacheTable = step.compressed[kind.name]
            known = lengths // kind.ratio
            entries = Side(table.block_table[own], torch.zeros_like(known), known, max(plan.entries, 1))
        yield Chunk(tokens, requests, side, slots, entries, places)


def gathered_rows(
    chunk: Chunk,
    caches: LayerCaches,
    selected: torch.Tensor | None,
    visible: torch.Tensor | None,
    model: ModelShape,
    dtype: torch.dtype,
) -> Sequence[Rows]:
    """Gather a chunk's rows of one layer: what its queries attend.

    Args:
        chunk: The chunk.
        caches: The layer's caches.
        selected: `[tokens, k]` entries that each query of the step attends; None for all of them.
        visible: `[tokens]`: entries that each query of the step sees; None without a compressor.
        model: The model's sizes.
        dtype: Of the workspaces.
    """
    rows = [Rows(chunk.window.gather(caches.window, model, dtype), chunk.window_slots)]
    entries = chunk.entries
    if entries is None or caches.compressed is None or visible is None:
        return rows
    cache, own = entries.gather(caches.compressed, model, dtype), visible[chunk.tokens]
    if selected is not None:
        chosen = kernels.entry_slots(selected[chunk.tokens], chunk.requests, chunk.places, entries.height)
        return [*rows, Rows(cache, chosen, own)]
    every = kernels.visible_slots(
        entries.count, chunk.places[:, 0], chunk.places, entries.height, entries.height
    )
    return [*rows, Rows(cache, every, own, chunk.requests)]
