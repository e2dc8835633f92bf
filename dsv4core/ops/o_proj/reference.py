"""Inverse RoPE, then each group of heads through its block of `wo_a`, then all groups through `wo_b`."""

from __future__ import annotations

import torch

from dsv4core.api.layer import Weight
from dsv4core.model.rope import rotate_back
from dsv4core.ops.linear import linear


def o_proj(
    attention: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    wo_a: Weight,
    wo_b: Weight,
    groups: int,
) -> torch.Tensor:
    """Project the attention output of this rank's heads.

    Values carry the rotation of their keys, so the output is rotated back at the query's position first.

    Args:
        attention: `[tokens, heads, head_dim]`, unpadded.
        positions: `[tokens]` int64.
        rope: `[max_positions, rope_dim]` fp32.
        wo_a: From `prepare_linear`, `[groups * o_lora_rank, heads / groups * head_dim]`.
        wo_b: From `prepare_linear`, `[hidden_size, groups * o_lora_rank]`.
        groups: Output groups of this rank.

    Returns:
        `[tokens, hidden_size]` of the attention's dtype: this rank's partial sum.
    """
    rotated = rotate_back(attention, positions, rope)
    grouped = rotated.unflatten(1, (groups, rotated.shape[1] // groups)).flatten(2).transpose(0, 1).float()
    low_rank = grouped @ wo_a.data.unflatten(0, (groups, -1)).transpose(1, 2)
    return linear(low_rank.transpose(0, 1).flatten(1).to(attention.dtype), wo_b)
