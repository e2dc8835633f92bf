"""RoPE by the definition."""

from __future__ import annotations

import torch


def turned(x: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """The last channels, in pairs of neighbours, turned by their positions' angles.

    Args:
        x: `[tokens, ..., width]` fp64.
        positions: `[tokens]`.
        rope: `[max_positions, rope_dim]`: cosines, then sines.
    """
    return _turned(x, rope[positions].double())


def turned_back(x: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """The same by the opposite angles."""
    cos, sin = rope[positions].double().chunk(2, dim=-1)
    return _turned(x, torch.cat([cos, -sin], dim=-1))


def _turned(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    width = table.shape[-1]
    cos, sin = table.view(-1, *[1] * (x.dim() - 2), width).chunk(2, dim=-1)
    even, odd = x[..., -width::2], x[..., -width + 1 :: 2]
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return torch.cat([x[..., :-width], pairs.flatten(-2)], dim=-1)
