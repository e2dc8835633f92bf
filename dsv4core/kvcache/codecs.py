"""Between rows of numbers and the bytes of a format. Plain torch; every kernel is held to these bytes."""

from __future__ import annotations

import torch

from dsv4core.api.kvcache import KVCacheFormat
from dsv4core.fp8 import FP8_MAX, MIN_AMAX, power_of_two_exponent, to_fp8

E8M0_BIAS = 127


def _quantize_tiles(
    values: torch.Tensor, tile: int, format: KVCacheFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes and int32 exponents of `values` `[rows, width]`, rounded to bf16 first."""
    assert format.fp8 is not None
    tiles = values.to(torch.bfloat16).float().unflatten(-1, (-1, tile))
    amax = tiles.abs().amax(-1).clamp_min(MIN_AMAX)
    exponent = power_of_two_exponent(amax, FP8_MAX[format.fp8])
    codes = to_fp8(torch.ldexp(tiles, -exponent.unsqueeze(-1)), format.fp8)
    return codes.flatten(-2), exponent


def _dtype(format: KVCacheFormat, part: int) -> torch.dtype:
    dtype = getattr(torch, format.parts[part].dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def encode_rows(
    format: KVCacheFormat, rows: torch.Tensor, scale: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Quantise rows to a format's bytes.

    Args:
        rows: `[n, width]` in any float dtype, rotary dimensions last and already rotated.
        scale: One fp32 element, for formats whose scale kind is `tensor`; None means 1.

    Returns:
        One `[n, region_bytes]` uint8 tensor for each region of the page.
    """
    if format.scale == "ue8m0_tile":
        nope, rope = rows.split([format.parts[0].width, format.parts[1].width], dim=-1)
        codes, exponent = _quantize_tiles(nope, format.tile, format)
        scales = torch.nn.functional.pad((exponent + E8M0_BIAS).clamp(0, 255), (0, 1)).to(torch.uint8)
        return [torch.cat([_bytes(codes), _bytes(rope.to(torch.bfloat16))], dim=-1), scales]
    if format.scale == "fp32_row":
        codes, exponent = _quantize_tiles(rows, format.tile, format)
        return [_bytes(codes), _bytes(torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent))]
    if format.scale == "tensor":
        assert format.fp8 is not None
        scaled = rows.float() if scale is None else rows.float() * scale.reciprocal()
        return [_bytes(to_fp8(scaled, format.fp8))]
    return [_bytes(rows.to(_dtype(format, 0)))]


def decode_rows(
    format: KVCacheFormat, regions: list[torch.Tensor], scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Read rows from a format's bytes: the inverse of `encode_rows`.

    Args:
        regions: One `[n, region_bytes]` uint8 tensor for each region.
        scale: As in `encode_rows`.

    Returns:
        `[n, width]` fp32.
    """
    if format.scale == "ue8m0_tile":
        nope, rope = regions[0].split([part.bytes for part in format.parts if part.region == 0], dim=-1)
        codes = nope.contiguous().view(_dtype(format, 0)).float().unflatten(-1, (-1, format.tile))
        exponent = regions[1][:, :-1].int() - E8M0_BIAS
        values = torch.ldexp(codes, exponent.unsqueeze(-1)).flatten(-2)
        return torch.cat([values, rope.contiguous().view(torch.bfloat16).float()], dim=-1)
    values = regions[0].contiguous().view(_dtype(format, 0)).float()
    if format.scale == "fp32_row":
        return values * regions[1].contiguous().view(torch.float32)
    return values if scale is None else values * scale
