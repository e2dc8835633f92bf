"""Tiles of rows that slots of two pools name, as attention fetches them ahead and decodes them.

What is fetched stays as it is stored until it is needed: then the compiler's pipeline may fetch it ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from dsv4core.fp8_triton import bf16_of_codes, fp8_values


@triton.jit
def tile_slots(tile, tiles, row, length, more_row, more_length, KEYS: tl.constexpr):
    """A tile's slots, -1 where it has none."""
    mine = tile < tiles
    column = tl.where(mine, tile, tile - tiles) * KEYS + tl.arange(0, KEYS)
    return tl.load(
        tl.where(mine, row, more_row) + column, mask=column < tl.where(mine, length, more_length), other=-1
    )


@triton.jit
def fetched(
    slot,
    mine,
    pool,
    page_stride,
    more_pool,
    more_page_stride,
    FORMAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MORE_PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A tile's rows as they are stored: codes or values, scales, rotary values; zeros for those without."""
    known, rows = tl.maximum(slot, 0), PAGE_SIZE
    number, offset = known // PAGE_SIZE, known % PAGE_SIZE
    if MORE_PAGE_SIZE != PAGE_SIZE:
        rows = tl.where(mine, PAGE_SIZE, MORE_PAGE_SIZE)
        number = tl.where(mine, number, known // MORE_PAGE_SIZE)
        offset = tl.where(mine, offset, known % MORE_PAGE_SIZE)
    stride = tl.where(mine, page_stride, more_page_stride).to(tl.int64)
    page = tl.where(mine, pool, more_pool) + number.to(tl.int64) * stride
    column, here = tl.arange(0, WIDTH)[None, :], (slot >= 0)[:, None]
    exponent, turned = 0, 0
    if FORMAT == 0:
        tile, rotary = tl.arange(0, WIDTH // 64)[None, :], tl.arange(0, 64)[None, :]
        base = tl.multiple_of(page + offset * (WIDTH + 64), [16])[:, None]
        scales = page + (rows * (WIDTH + 64) + offset * 8)
        values = tl.load(base + column, mask=here & (column < WIDTH - 64), other=0)
        exponent = tl.load(scales[:, None] + tile, mask=here & (tile < WIDTH // 64 - 1), other=0)
        turned = tl.load(
            (base + (WIDTH - 64)).to(tl.pointer_type(tl.bfloat16)) + rotary, mask=here, other=0.0
        )
    elif FORMAT == 1:
        halves = (page + offset * (2 * WIDTH)).to(tl.pointer_type(tl.bfloat16))
        values = tl.load(tl.multiple_of(halves, [16])[:, None] + column, mask=here, other=0.0)
    elif FORMAT == 3:
        floats = (page + offset * (4 * WIDTH)).to(tl.pointer_type(tl.float32))
        values = tl.load(tl.multiple_of(floats, [16])[:, None] + column, mask=here, other=0.0)
    else:
        values = tl.load(tl.multiple_of(page + offset * WIDTH, [16])[:, None] + column, mask=here, other=0)
    return values, exponent, turned


@triton.jit
def decoded(
    values,
    exponent,
    turned,
    mine,
    scale,
    more_scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    SHIFT: tl.constexpr,
    APART: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Rows `[KEYS, WIDTH]` times 2^-SHIFT. With APART packed ones have zeros in place of rotary channels.

    Those are the second result, `[KEYS, 64]`: a select among 512 channels takes registers attention lacks.
    """
    if FORMAT == 0:
        if SHIFT:
            bits = (exponent.to(tl.uint16) + (120 - SHIFT)) << 7
            factor = (
                tl.where(exponent > 134 + SHIFT, 0x7FC0, bits).to(tl.uint16).to(tl.bfloat16, bitcast=True)
            )
            tiles = tl.reshape(bf16_of_codes(values), (KEYS, WIDTH // 64, 64)) * factor[:, :, None]
            # Not a float: Triton 3.6 makes 0 of a bf16 constant of 2^-60.
            tiny = tl.full((1, 64), (127 - SHIFT) << 7, tl.uint16).to(tl.bfloat16, bitcast=True)
            turned = turned * tiny
        else:
            factor = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            factor = tl.where(exponent == 255, float("nan"), tl.where(exponent == 0, 2.0**-127, factor))
            plain = _values(values, FNUZ, DTYPE)
            tiles = tl.reshape(plain, (KEYS, WIDTH // 64, 64)) * factor.to(plain.dtype)[:, :, None]
        turned = turned.to(DTYPE)
        if APART:
            rows = tl.reshape(tiles, (KEYS, WIDTH)).to(DTYPE)
        else:
            last = tl.arange(0, WIDTH // 64)[None, :, None] == WIDTH // 64 - 1
            rows = tl.reshape(tl.where(last, turned[:, None, :], tiles.to(DTYPE)), (KEYS, WIDTH))
    elif FORMAT == 2:
        rows = _values(values, FNUZ, DTYPE)
        if (scale is not None) or (more_scale is not None):
            own = 1.0 if scale is None else tl.load(scale)
            rows = rows.to(tl.float32) * tl.where(
                mine, own, 1.0 if more_scale is None else tl.load(more_scale)
            )
        rows = rows.to(DTYPE)
        turned = rows
    else:
        rows = values.to(DTYPE)
        turned = rows
    return rows, turned


@triton.jit
def _values(codes, FNUZ: tl.constexpr, DTYPE: tl.constexpr):
    """Codes as values: bf16 where the chip makes them and they are wanted so, else fp32."""
    if not cuda_capability_geq(8, 9) or FNUZ:
        values = fp8_values(codes, FNUZ).to(tl.float32)
    elif tl.bfloat16 == DTYPE:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    else:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return values
