"""Queries as attention takes them, and what goes into the caches."""

from __future__ import annotations

import torch

from dsv4core.api import LayerKind
from dsv4core.testing.oracle.rotation import turned


def queries(q: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor, eps: float) -> torch.Tensor:
    """Each head by its root mean square, rotated to its position.

    Args:
        q: `[tokens, heads, head_dim]`.
        positions: `[tokens]`.
        rope: `[max_positions, rope_dim]`: cosines, then sines.
        eps: Of the norm.

    Returns:
        Like `q`, fp64 on the CPU.
    """
    q = q.cpu().double()
    q = q / (q.square().mean(-1, keepdim=True) + eps).sqrt()
    return turned(q, positions.cpu(), rope.cpu())


def keys(kv: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rows of the window cache, `[tokens, head_dim]`: keys rotated to their positions."""
    return turned(kv.cpu().double(), positions.cpu(), rope.cpu())


def entry(
    values: torch.Tensor,
    scores: torch.Tensor,
    norm: torch.Tensor,
    rope: torch.Tensor,
    eps: float,
    kind: LayerKind,
    number: int,
) -> torch.Tensor:
    """One entry of a compressed or index cache, `[width]`.

    Entry j pools the tokens `ratio * j … ratio * (j + 1) - 1`. With overlap (two groups of channels) it pools
    the first half of the channels of the `ratio` tokens before them, too, and the second half of its own.

    Args:
        values: `[tokens, groups * width]` fp64 of one request from its first token on.
        scores: The same, ape included.
        norm: `[width]`.
        rope: `[max_positions, rope_dim]`: cosines, then sines.
        number: j.
    """
    assert kind.ratio is not None
    first, width = kind.ratio * number, values.shape[1] // kind.groups
    own = slice(first, first + kind.ratio)
    pooled, weights = values[own, -width:], scores[own, -width:]
    if kind.groups == 2 and number:
        before = slice(first - kind.ratio, first)
        pooled = torch.cat([values[before, :width], pooled])
        weights = torch.cat([scores[before, :width], weights])
    row = (weights.softmax(0) * pooled).sum(0)
    row = row / (row.square().mean() + eps).sqrt() * norm.cpu().double()
    return turned(row[None], torch.tensor([first]), rope.cpu())[0]
