"""Rows of the cache formats in Triton kernels: the bytes of `dsv4core.kvcache.codecs`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4core.fp8_triton import (
    bf16_bits,
    bf16_value,
    fp8_codes,
    fp8_values,
    magnitude,
    power_of_two,
    reciprocal,
    two_to,
)
from dsv4core.kvcache.cache import KVCache

PACKED, BF16, FP8, FP32, SCALED = range(5)
FORMATS: Mapping[str, int] = MappingProxyType(
    {
        "fp8_ds_mla": PACKED,
        "bf16": BF16,
        "fp8_e4m3": FP8,
        "fp32": FP32,
        "index_fp8": SCALED,
        "index_bf16": BF16,
        "index_fp32": FP32,
    }
)
"""How a kernel stores and loads the rows of a format; kernels name these numbers."""


def cache_arguments(cache: KVCache) -> dict[str, Any]:
    """What `store_row` and `load_rows` have to know of a cache, as a kernel's arguments."""
    return {
        "pool": cache.pool.view(torch.uint8),
        "page_stride": cache.page_stride_bytes,
        "page_size": cache.page_size,
        "scale": cache.scale,
        "FORMAT": FORMATS[cache.format.name],
        "FNUZ": cache.format.fp8 == "e4m3fnuz",
    }


@triton.jit
def store_row(
    row,
    slot,
    pool,
    page_stride,
    page_size,
    scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store a row `[WIDTH]` fp32 at a slot that is not negative."""
    column = tl.arange(0, WIDTH)
    offset = slot % page_size
    page = pool + (slot // page_size).to(tl.int64) * page_stride
    if FORMAT == 0:
        store_packed(row, page, offset, page_size, FNUZ, WIDTH)
    elif FORMAT == 1:
        tl.store((page + offset * (2 * WIDTH)).to(tl.pointer_type(tl.uint16)) + column, bf16_bits(row))
    elif FORMAT == 2:
        if scale is not None:
            row = row * reciprocal(tl.load(scale))
        tl.store(page + offset * WIDTH + column, fp8_codes(row, FNUZ))
    elif FORMAT == 3:
        tl.store((page + offset * (4 * WIDTH)).to(tl.pointer_type(tl.float32)) + column, row)
    else:
        rounded = bf16_value(bf16_bits(row))
        exponent = power_of_two(magnitude(rounded, 0), 1e-4, FNUZ)
        tl.store(page + offset * WIDTH + column, fp8_codes(rounded * two_to(-exponent), FNUZ))
        scales = (page + page_size * WIDTH).to(tl.pointer_type(tl.float32))
        tl.store(scales + offset, two_to(exponent))


@triton.jit
def store_packed(row, page, offset, page_size, FNUZ: tl.constexpr, WIDTH: tl.constexpr):
    """448 FP8 codes in tiles of 64, 64 rotary values as bf16; and in the page's second region 7 scales."""
    column = tl.arange(0, WIDTH)
    bits = bf16_bits(row)
    tiles = tl.reshape(bf16_value(bits), (WIDTH // 64, 64))
    exponent = power_of_two(magnitude(tiles, 1), 1e-4, FNUZ)
    codes = tl.reshape(fp8_codes(tiles * two_to(-exponent)[:, None], FNUZ), (WIDTH,))
    base = page + offset * (WIDTH + 64)
    tl.store(base + column, codes, mask=column < WIDTH - 64)
    rotary = (base + WIDTH - 64).to(tl.pointer_type(tl.uint16))
    tl.store(rotary + column - (WIDTH - 64), bits, mask=column >= WIDTH - 64)
    tile = tl.arange(0, WIDTH // 64)
    scales = page + page_size * (WIDTH + 64) + offset * 8
    code = tl.minimum(tl.maximum(exponent + 127, 0), 255)
    tl.store(scales + tile, tl.where(tile < 7, code, 0).to(tl.uint8))


@triton.jit
def load_rows(
    pages,
    offset,
    wanted,
    pool,
    page_stride,
    page_size,
    scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    WIDTH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Rows `[n, WIDTH]` at offsets `[n]` of pages, and their factors `[n]`; zeros where they are not wanted.

    FP8 rows come as FP8 where it is `NATIVE`, else as fp16, which holds each code; bf16 and fp32 as fp32.
    """
    column = tl.arange(0, WIDTH)[None, :]
    page = pages.to(tl.int64) * page_stride
    here = wanted[:, None]
    ones = tl.where(wanted, 1.0, 0.0)
    if FORMAT == 1:
        halves = (pool + (page + offset * (2 * WIDTH))).to(tl.pointer_type(tl.uint16))[:, None] + column
        values, factors = bf16_value(tl.load(halves, mask=here, other=0)), ones
    elif FORMAT == 3:
        floats = (pool + (page + offset * (4 * WIDTH))).to(tl.pointer_type(tl.float32))[:, None] + column
        values, factors = tl.load(floats, mask=here, other=0.0), ones
    else:
        codes = pool + (page + offset * WIDTH)[:, None] + column
        if NATIVE:
            codes = codes.to(tl.pointer_type(tl.float8e4b8 if FNUZ else tl.float8e4nv))
            values = tl.load(codes, mask=here, other=0.0)
        else:
            values = fp8_values(tl.load(codes, mask=here, other=0), FNUZ)
        if FORMAT == 2:
            factors = ones if scale is None else ones * tl.load(scale)
        else:
            own = (pool + (page + page_size * WIDTH + offset * 4)).to(tl.pointer_type(tl.float32))
            factors = tl.load(own, mask=wanted, other=0.0)
    return values, factors
