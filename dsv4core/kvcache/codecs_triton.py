"""Rows of the cache formats in Triton kernels: the bytes of `dsv4core.kvcache.codecs`.

FP8 codes are made and read with integers: sm_80 and sm_86 convert none, and every chip gets the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl

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
        "scale": one(cache.pool.device) if cache.scale is None else cache.scale,
        "FORMAT": FORMATS[cache.format.name],
        "FNUZ": cache.format.fp8 == "e4m3fnuz",
    }


@lru_cache
def one(device: torch.device) -> torch.Tensor:
    """A scale of 1 on a device, the same tensor each time: captured graphs keep its address."""
    return torch.ones(1, dtype=torch.float32, device=device)


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
        tl.store(page + offset * WIDTH + column, fp8_codes(row * (1.0 / tl.load(scale)), FNUZ))
    elif FORMAT == 3:
        tl.store((page + offset * (4 * WIDTH)).to(tl.pointer_type(tl.float32)) + column, row)
    else:
        rounded = bf16_value(bf16_bits(row))
        exponent = power_of_two(tl.max(tl.abs(rounded), axis=0), FNUZ)
        tl.store(page + offset * WIDTH + column, fp8_codes(times_power_of_two(rounded, -exponent), FNUZ))
        scales = (page + page_size * WIDTH).to(tl.pointer_type(tl.float32))
        tl.store(scales + offset, times_power_of_two(exponent * 0.0 + 1.0, exponent))


@triton.jit
def store_packed(row, page, offset, page_size, FNUZ: tl.constexpr, WIDTH: tl.constexpr):
    """448 FP8 codes in tiles of 64, 64 rotary values as bf16; and in the page's second region 7 scales."""
    column = tl.arange(0, WIDTH)
    bits = bf16_bits(row)
    tiles = tl.reshape(bf16_value(bits), (WIDTH // 64, 64))
    exponent = power_of_two(tl.max(tl.abs(tiles), axis=1), FNUZ)
    codes = tl.reshape(fp8_codes(times_power_of_two(tiles, -exponent[:, None]), FNUZ), (WIDTH,))
    base = page + offset * (WIDTH + 64)
    tl.store(base + column, codes, mask=column < WIDTH - 64)
    rotary = (base + WIDTH - 64).to(tl.pointer_type(tl.uint16))
    tl.store(rotary + column - (WIDTH - 64), bits, mask=column >= WIDTH - 64)
    tile = tl.arange(0, WIDTH // 64)
    scales = page + page_size * (WIDTH + 64) + offset * 8
    code = tl.minimum(tl.maximum(exponent + 127, 0), 255)
    tl.store(scales + tile, tl.where(tile < 7, code, 0).to(tl.uint8))


@triton.jit
def bf16_bits(x):
    """fp32 rounded to bf16, ties to even, as its bits; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16)


@triton.jit
def bf16_value(bits):
    """The fp32 value of bf16 bits."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(amax, FNUZ: tl.constexpr):
    """`ceil(log2(max(amax, 1e-4) / largest code))`; 128 where `amax` is infinite or NaN."""
    bits = tl.maximum(amax, 1e-4).to(tl.int32, bitcast=True)  # a NaN may become 1e-4 here: see below
    power: tl.constexpr = 134 if FNUZ else 135  # 448 is 0.875 * 2 ** 9, and 126 is a mantissa's bias
    exponent = (bits >> 23) - power + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(amax < float("inf"), exponent, 128)


@triton.jit
def times_power_of_two(x, exponent):
    """`x * 2 ** exponent`, exact where the result is a normal number, for exponents of -128 to 254."""
    half = exponent >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)
    return x * first * second


@triton.jit
def fp8_codes(x, FNUZ: tl.constexpr):
    """E4M3 codes of fp32 values, clamped to 448 (FNUZ: 224), ties to even; NaN stays NaN."""
    largest: tl.constexpr = 224.0 if FNUZ else 448.0
    bias: tl.constexpr = 8 if FNUZ else 7
    sign = (x.to(tl.uint32, bitcast=True) >> 31) << 7
    size = tl.minimum(tl.abs(x), largest)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - bias) << 3)
    # 2 ** 23 has no room for fractions: the sum is rounded, ties to even.
    unit: tl.constexpr = 2.0 ** (bias + 2)
    small = (size * unit + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(size < 2.0 ** (1 - bias), small, normal)
    if FNUZ:
        code = tl.where(code == 0, 0, code | sign.to(tl.int32))
        return tl.where(x == x, code, 0x80).to(tl.uint8)
    return tl.where(x == x, code | sign.to(tl.int32), 0x7F | sign.to(tl.int32)).to(tl.uint8)


@triton.jit
def load_rows(
    slots,
    wanted,
    pool,
    page_stride,
    page_size,
    scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rows `[n, WIDTH]` at slots `[n]` and their factors `[n]`; zeros where they are not wanted.

    FP8 codes come as fp16, which holds each of them, bf16 and fp32 as fp32.
    """
    column = tl.arange(0, WIDTH)[None, :]
    offset = slots % page_size
    page = (slots // page_size).to(tl.int64) * page_stride
    here = wanted[:, None]
    ones = tl.where(wanted, 1.0, 0.0)
    if FORMAT == 1:
        halves = (pool + page + offset * (2 * WIDTH)).to(tl.pointer_type(tl.uint16))[:, None] + column
        values, factors = bf16_value(tl.load(halves, mask=here, other=0)), ones
    elif FORMAT == 3:
        floats = (pool + page + offset * (4 * WIDTH)).to(tl.pointer_type(tl.float32))[:, None] + column
        values, factors = tl.load(floats, mask=here, other=0.0), ones
    else:
        codes = tl.load(pool + (page + offset * WIDTH)[:, None] + column, mask=here, other=0)
        values = fp8_values(codes, FNUZ)
        if FORMAT == 2:
            factors = ones * tl.load(scale)
        else:
            own = (pool + page + page_size * WIDTH + offset * 4).to(tl.pointer_type(tl.float32))
            factors = tl.load(own, mask=wanted, other=0.0)
    return values, factors


@triton.jit
def fp8_values(codes, FNUZ: tl.constexpr):
    """The fp16 values of E4M3 codes. Their bits, moved to fp16's place, are off by a power of two."""
    size = (codes & 0x7F).to(tl.uint16)
    value = (size << 7).to(tl.float16, bitcast=True) * (128.0 if FNUZ else 256.0)
    value = tl.where((codes & 0x80) != 0, -value, value)
    nan: tl.constexpr = float("nan")
    return tl.where(codes == 0x80, nan, value) if FNUZ else tl.where(size == 0x7F, nan, value)
