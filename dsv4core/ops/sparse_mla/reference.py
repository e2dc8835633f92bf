"""Sparse multi-query attention with a sink. Key and value are one cached row, rotary dimensions included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4core.kvcache import KVCache
from dsv4core.workspace import MOST_SHARED, QUERY_TILE


class Rows(NamedTuple):
    """Rows of one pool that queries attend.

    Attributes:
        cache: The pool.
        slots: `[tokens, k]` int32; negative is nothing, wherever it stands. One named twice counts twice.
        lengths: `[tokens]`: columns from the front that count; None if all do.
        table_rows: `[tokens]`: each query's row of `slots`, which then may be shared; None if it is its own.
    """

    cache: KVCache
    slots: torch.Tensor
    lengths: torch.Tensor | None = None
    table_rows: torch.Tensor | None = None

    @property
    def named(self) -> torch.Tensor:
        """Each query's slots, -1 behind its length."""
        slots = self.slots if self.table_rows is None else self.slots[self.table_rows]
        if self.lengths is None:
            return slots
        column = torch.arange(slots.shape[1], device=slots.device)
        return torch.where(column < self.lengths[:, None], slots, -1)


Pool = tuple[KVCache, torch.Tensor]


def sparse_mla(
    q: torch.Tensor,
    pools: Sequence[Rows | Pool],
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
    want_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend over the named rows of all pools together.

    With `s_j = softmax_scale * q · k_j` and `v_j = k_j`:
    `out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink))`.
    The sink is a logit of its own, not scaled. A query that names no row gives exact zeros.

    Args:
        q: `[tokens, heads, head_dim]`.
        pools: The rows of each pool; a pair is a pool and its slots.
        softmax_scale: Factor of the scores.
        sinks: `[heads]` fp32, minus infinity for none; None leaves the sink out.
        want_lse: Whether to return the log-sum-exp, too.

    Returns:
        `[tokens, heads, head_dim]` of `q.dtype`, bf16 for an FP8 q; and the log-sum-exp `[tokens, heads]`
        fp32 or None: natural logarithm, sink excluded, minus infinity where nothing is attended.
    """
    out = torch.empty(q.shape, dtype=torch.bfloat16 if q.itemsize == 1 else q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if want_lse else None
    tiles = [(start, min(start + QUERY_TILE, q.shape[0])) for start in range(0, q.shape[0], QUERY_TILE)]
    named = [(rows.cache, rows.named) for rows in (Rows(*own) for own in pools)]
    while tiles:
        start, end = tiles.pop()
        tile = _read_tile([(cache, slots[start:end]) for cache, slots in named])
        if tile is None:
            middle = (start + end) // 2
            tiles += [(start, middle), (middle, end)]
        else:
            scores = _scores(q[start:end].float(), *tile, softmax_scale)
            out[start:end] = _weights(scores, sinks) @ tile[0]
            if lse is not None:
                lse[start:end] = scores.logsumexp(-1)
    return out, lse


def _read_tile(pools: Sequence[Pool]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The rows that a tile of queries names, read once, and how often each query names each.

    Returns:
        Rows `[n, head_dim]` fp32 and counts `[tokens, n]` fp32; for a single query its rows as named, and
        None. Nothing at all if the queries should not share: they have too few rows in common, or a row is
        not finite, which only those that name it may notice.
    """
    if pools[0][1].shape[0] == 1:
        return torch.cat([cache.read(slots[slots >= 0]) for cache, slots in pools]), None
    named = [_distinct(slots) for _, slots in pools]
    widest = sum(slots.shape[1] for _, slots in pools)
    if sum(slots.shape[0] for slots, _ in named) > MOST_SHARED * widest:
        return None
    rows = torch.cat([cache.read(slots) for (cache, _), (slots, _) in zip(pools, named, strict=True)])
    if not rows.isfinite().all():
        return None
    return rows, torch.cat([count for _, count in named], dim=1)


def _distinct(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The valid slots of a table without repetition, and how often each row of it names each of them."""
    distinct, column = slots.unique(return_inverse=True)
    count = torch.zeros(slots.shape[0], distinct.shape[0], device=slots.device)
    count.scatter_add_(1, column, torch.ones_like(column, dtype=count.dtype))
    valid = distinct >= 0
    return distinct[valid], count[:, valid]


def _scores(
    q: torch.Tensor, rows: torch.Tensor, count: torch.Tensor | None, softmax_scale: float
) -> torch.Tensor:
    """`[tokens, heads, n]`: a row that is named n times scores log n more, one that is not minus infinity."""
    scores = (q * softmax_scale) @ rows.T
    if count is None:
        return scores
    unnamed = (count == 0)[:, None]  # filled, not added: its score may be infinite
    return scores.add_(count.clamp_min(1).log()[:, None]).masked_fill_(unnamed, float("-inf"))


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax `[tokens, heads, n]` over the rows and the sink, which has no row.

    A finite sink, however low, leaves zeros and no NaN where nothing is attended.
    """
    lowest = torch.finfo(torch.float32).min
    sink = scores.new_full((1,), lowest) if sinks is None else sinks.float().clamp(lowest, -lowest)
    column = sink[:, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
