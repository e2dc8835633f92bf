"""The FP8 input of the grouped output projection, in blocks of 128 values with a power-of-two scale."""

from __future__ import annotations

import torch

from dsv4core.fp8 import power_of_two_exponent, to_fp8
from dsv4core.model.rope import rotate_back

BLOCK = 128
MIN_AMAX = 1e-10


def inverse_rope_quant(
    attention: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    shares: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate back at the query's position, then quantise each head in blocks of 128 values.

    Args:
        attention: `[tokens, heads, head_dim]`, head_dim a multiple of 128.
        positions: `[tokens]` int64.
        rope: `[max_positions, rope_dim]` fp32.
        shares: `[tokens, heads]` fp32 that heads are multiplied with, as by their sinks; 0 makes a head 0
            whatever it was. None for none.

    Returns:
        `[tokens, heads, head_dim]` float8_e4m3fn, and fp32 scales `[tokens, heads, head_dim / 128]`:
        the smallest power of two that brings the block's largest magnitude (at least 1e-10) to 448 or less.
    """
    values = attention.float()
    if shares is not None:
        values = torch.where(shares[..., None] == 0, 0.0, values * shares[..., None])
    blocks = rotate_back(values, positions, rope).unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1).clamp_min(MIN_AMAX)
    scale = torch.ldexp(torch.ones_like(amax), power_of_two_exponent(amax))
    return to_fp8(blocks / scale.unsqueeze(-1)).flatten(-2), scale
