"""The kernel: attention of one query over cached rows in tiles, with a running maximum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4core.kvcache import KVCache

NOTHING = float("-inf")


def attend(
    q: torch.Tensor,
    pools: Sequence[tuple[KVCache, torch.Tensor]],
    scale: float,
    sinks: torch.Tensor,
    tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query over the rows that it names.

    Each query is computed by itself, so that its result does not depend on the others.

    Args:
        q: `[tokens, heads, head_dim]`.
        pools: Caches, each with the slots `[tokens, k]` that the queries read; negative is nothing.
        scale: Factor of the scores.
        sinks: `[heads]` fp32, minus infinity for none.
        tile: Rows that are read at a time.

    Returns:
        `[tokens, heads, head_dim]` of `q.dtype`, and the log-sum-exp `[tokens, heads]` fp32 without the sink.
    """
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], NOTHING, device=q.device)
    for token in range(q.shape[0]):
        named = [(cache, slots[token][slots[token] >= 0]) for cache, slots in pools]
        out[token], lse[token] = _attend_one(q[token].float() * scale, named, sinks, tile)
    return out, lse


def _attend_one(
    q: torch.Tensor, named: Sequence[tuple[KVCache, torch.Tensor]], sinks: torch.Tensor, tile: int
) -> tuple[torch.Tensor, torch.Tensor]:
    most = torch.full_like(q[:, 0], NOTHING)
    total = torch.zeros_like(most)
    out = torch.zeros_like(q)
    for cache, slots in named:
        for part in slots.split(tile) if slots.numel() else ():
            rows = cache.read(part)
            scores = q @ rows.T
            higher = torch.maximum(most, scores.amax(dim=-1))
            weights = (scores - higher[:, None]).exp()
            kept = (most - higher).exp()
            total = total * kept + weights.sum(-1)
            out = out * kept[:, None] + weights @ rows
            most = higher
    lse = most + total.log()
    # A sink that takes everything, and a query that sees nothing, leave exact zeros.
    shares = (most - torch.logaddexp(lse, sinks)).exp().nan_to_num(0.0)
    return out * shares[:, None], lse
