"""Block-scaled FP8: one power-of-two scale for each block of a weight, as in DeepSeek's checkpoints."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from dsv4core.api.layer import Weight
from dsv4core.fp8 import FP8_MAX, power_of_two_exponent, to_fp8

_E8M0_BIAS = 127


def quantize_block(
    weight: torch.Tensor, block: tuple[int, int] = (128, 128)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to FP8 with one scale a block: the smallest power of two that fits the block.

    `scale = 2 ** ceil(log2(amax / 448))`; a block of zeros has scale 1. Edge blocks may be smaller.

    Args:
        weight: `[rows, columns]`, finite, any floating dtype.
        block: Rows and columns of a block.

    Returns:
        `[rows, columns]` float8_e4m3fn, and
        `[ceil(rows / block[0]), ceil(columns / block[1])]` float8_e8m0fnu.
    """
    rows, columns = weight.shape
    padded = pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    amax = padded.abs().unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).amax(dim=(1, 3))
    amax = torch.where(amax > 0, amax, FP8_MAX["e4m3fn"])
    exponent = power_of_two_exponent(amax).clamp(-_E8M0_BIAS, _E8M0_BIAS)
    scale = (exponent + _E8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)
    data = weight.float() / _spread(scale, rows, columns, block)
    return to_fp8(data), scale


def has_power_of_two_blocks(weight: Weight, groups: int, block: int = 128) -> bool:
    """Whether groups of rows are E4M3 in whole blocks of `block x block`, scaled by powers of two."""
    rows, columns = weight.data.shape
    whole = weight.block == (block, block) and columns % block == 0 and rows % (groups * block) == 0
    if weight.scale is None or weight.data.dtype != torch.float8_e4m3fn or not whole:
        return False
    mantissa, _ = torch.frexp(weight.scale.float())
    return bool((mantissa == 0.5).all())


def dequantize_block(data: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The values that a block-scaled FP8 matrix stands for.

    Args:
        data: `[rows, columns]` FP8.
        scale: `[ceil(rows / block[0]), ceil(columns / block[1])]`, float8_e8m0fnu or float32.
        block: Rows and columns that share a scale.

    Returns:
        `[rows, columns]` fp32.
    """
    rows, columns = data.shape
    return data.float() * _spread(scale, rows, columns, block)


def _spread(scale: torch.Tensor, rows: int, columns: int, block: tuple[int, int]) -> torch.Tensor:
    """The scale of every value, `[rows, columns]` fp32."""
    spread = scale.float()[:, None, :, None].expand(-1, block[0], -1, block[1])
    return spread.flatten(2).flatten(0, 1)[:rows, :columns]
