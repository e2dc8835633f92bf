"""Attention and its output projection."""

from __future__ import annotations

import torch

from dsv4core.api import LayerKind, Step, Weight
from dsv4core.kvcache import KVCache
from dsv4core.model.blocks import dequantize_block
from dsv4core.testing.oracle.rotation import turned_back


def attend(
    q: torch.Tensor,
    window: KVCache,
    compressed: KVCache | None,
    selected: torch.Tensor | None,
    step: Step,
    kind: LayerKind,
    window_tokens: int,
    softmax_scale: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What every query of a step attends to.

    A query at position p sees the tokens `max(0, p - window_tokens + 1) … p`, and of the
    `(p + 1) // ratio` entries that are complete those in `selected`, or all.

    Args:
        q: `[tokens, heads, head_dim]`, unpadded.
        selected: `[tokens, k]` request-local entries, or None.
        sinks: `[heads]`, or None for none.

    Returns:
        `[tokens, heads, head_dim]` and the log-sum-exp `[tokens, heads]`, fp64 on the CPU.
    """
    outputs, sums = [], []
    requests, positions = step.token_to_request.tolist(), step.positions.tolist()
    table = step.compressed[kind.name] if compressed is not None else None
    for token, (request, position) in enumerate(zip(requests, positions, strict=True)):
        seen = torch.arange(max(0, position - window_tokens + 1), position + 1)
        rows = [cached_rows(window, seen, step.window.block_table[request])]
        if compressed is not None and table is not None and kind.ratio is not None:
            entries = torch.arange((position + 1) // kind.ratio)
            if selected is not None:
                chosen = selected[token].cpu().long()
                entries = chosen[chosen >= 0]
            rows.append(cached_rows(compressed, entries, table.block_table[request]))
        out, lse = _softmax(q[token].cpu().double(), torch.cat(rows), softmax_scale, sinks)
        outputs.append(out)
        sums.append(lse)
    if not outputs:
        return torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:2], dtype=torch.float64)
    return torch.stack(outputs), torch.stack(sums)


def project(
    attention: torch.Tensor,
    positions: torch.Tensor | None,
    rope: torch.Tensor,
    wo_a: Weight,
    wo_b: Weight,
    groups: int,
) -> torch.Tensor:
    """The output projection: rotate back, `wo_a` by group of heads, `wo_b` over all groups.

    Args:
        attention: `[tokens, heads, head_dim]`, unpadded.
        positions: `[tokens]`; None where the output is rotated back already.
        rope: `[max_positions, rope_dim]`: cosines, then sines.
        groups: Output groups of this rank.

    Returns:
        `[tokens, hidden_size]` fp64 on the CPU.
    """
    attention = attention.cpu().double()
    if positions is not None:
        attention = turned_back(attention, positions.cpu(), rope.cpu())
    grouped = attention.flatten(1).unflatten(1, (groups, -1))
    low_rank = torch.einsum("tgd,grd->tgr", grouped, _values(wo_a).unflatten(0, (groups, -1)))
    return low_rank.flatten(1) @ _values(wo_b).T


def cached_rows(cache: KVCache, numbers: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """Rows of one request by number, `[n, width]` fp64; those on pages that it does not have are left out."""
    page = block_table.cpu().long()[numbers // cache.page_size]
    slots = (page * cache.page_size + numbers % cache.page_size)[page >= 0]
    return cache.read(slots.to(cache.pool.device)).cpu().double()


def _values(weight: Weight) -> torch.Tensor:
    data = weight.data.cpu()
    if weight.scale is None or weight.block is None:
        return data.double()
    return dequantize_block(data, weight.scale.cpu(), weight.block).double()


def _softmax(
    q: torch.Tensor, rows: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = q @ rows.T * scale
    lse = scores.logsumexp(-1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.cpu().double())
    # Nothing to attend gives 0, whatever the sink; an infinite sink takes everything.
    weights = (scores - total[:, None]).exp().nan_to_num(0.0)
    return weights @ rows, lse
