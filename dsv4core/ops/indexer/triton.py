"""The indexer in kernels: queries in the keys' precision, and scores of all visible entries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4core.api.errors import ConfigError
from dsv4core.api.step import CacheTable
from dsv4core.fp8_triton import (
    bf16_bits,
    bf16_value,
    fp8_codes,
    fp8_values,
    magnitude,
    multiplies_fp8,
    power_of_two,
    stages,
    two_to,
)
from dsv4core.kvcache import KVCache
from dsv4core.kvcache.codecs_triton import cache_arguments, load_rows
from dsv4core.model.rope_triton import rotated

HEADS = 16
"""Heads of a program that rotates queries."""
KEYS = 64
"""Keys that are multiplied at a time."""
SPAN = 512
"""Keys of a program, which loads its queries once: 512 programs for a context of 1M tokens."""
STAGES = 6
"""Tiles of keys in flight on NVIDIA's chips: 8 KB each."""
PRECISIONS = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp32": torch.float32}


def index_query(
    q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor, index_dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the definition; the width of a head is a power of two."""
    if index_dtype not in PRECISIONS:
        raise ConfigError(f"index_dtype={index_dtype} has no query precision here; use fp8, bf16 or fp32.")
    tokens, heads, width = q.shape
    out = torch.empty(tokens, heads, width, dtype=PRECISIONS[index_dtype], device=q.device)
    folded = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens:
        _rotate_queries[(tokens, triton.cdiv(heads, HEADS))](
            q,
            weights,
            positions,
            rope,
            out.view(torch.uint8) if index_dtype == "fp8" else out,
            folded,
            heads,
            q.stride(0),
            weights.stride(0),
            width**-0.5 * heads**-0.5,
            HEADS=HEADS,
            WIDTH=width,
            ROPE=rope.shape[1],
            FP8=index_dtype == "fp8",
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out, folded


def index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: KVCache,
    table: CacheTable,
    token_to_request: torch.Tensor,
    visible: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """As the definition; heads and width of a head are powers of two."""
    tokens, heads, dim = q.shape
    logits = torch.empty(tokens, width, dtype=torch.float32, device=q.device)
    if tokens and width:
        fp8 = q.itemsize == 1
        _score[(tokens, triton.cdiv(width, SPAN))](
            q.view(torch.uint8) if fp8 else q,
            weights,
            token_to_request,
            visible,
            table.block_table,
            logits,
            width,
            *table.block_table.shape,
            q.stride(0),
            weights.stride(0),
            table.block_table.stride(0),
            **cache_arguments(keys),
            HEADS=heads,
            WIDTH=dim,
            KEYS=KEYS,
            SPAN=SPAN,
            WHOLE=keys.page_size % KEYS == 0,
            Q_FP8=fp8,
            Q_FNUZ=q.dtype == torch.float8_e4m3fnuz,
            NATIVE=fp8 and q.dtype == _dtype(keys) and multiplies_fp8(q.device, q.dtype),
            num_warps=4,
            num_stages=stages(q.device, STAGES),
        )
    return logits


def _dtype(keys: KVCache) -> torch.dtype | None:
    """The flavour of FP8 keys."""
    return None if keys.format.fp8 is None else getattr(torch, f"float8_{keys.format.fp8}")


@triton.jit
def _rotate_queries(
    q,
    weights,
    positions,
    rope,
    out,
    folded,
    heads,
    q_stride,
    weight_stride,
    factor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    here = head < heads
    place = head[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(q + token * q_stride + place, mask=here[:, None], other=0.0).to(tl.float32)
    x = rotated(x, rope, tl.load(positions + token), 1, HEADS, WIDTH, ROPE)
    weight = tl.load(weights + token * weight_stride + head, mask=here, other=0.0).to(tl.float32)
    if FP8:
        x = bf16_value(bf16_bits(x))
        exponent = power_of_two(magnitude(x, 1), 1e-4, False)
        x = fp8_codes(x * two_to(-exponent)[:, None], False)
        weight = weight * two_to(exponent >> 1) * two_to(exponent - (exponent >> 1))  # 2 ** 128 overflows
    tl.store(out + token * heads * WIDTH + place, x.to(out.dtype.element_ty), mask=here[:, None])
    tl.store(folded + token * heads + head, weight * factor, mask=here)


@triton.jit
def _score(
    q,
    weights,
    token_to_request,
    visible,
    block_table,
    logits,
    width,
    requests,
    pages,
    q_stride,
    weight_stride,
    table_stride,
    pool,
    page_stride,
    page_size,
    scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    WHOLE: tl.constexpr,
    Q_FP8: tl.constexpr,
    Q_FNUZ: tl.constexpr,
    NATIVE: tl.constexpr,
):
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * SPAN
    seen = tl.minimum(tl.load(visible + token).to(tl.int32), width)
    request = tl.load(token_to_request + token).to(tl.int64)
    if (first >= seen) | (request < 0) | (request >= requests):
        return
    row = logits + token * width
    table = block_table + request * table_stride
    head, channel = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    place = q + token * q_stride + head[None, :] * WIDTH + channel[:, None]
    if NATIVE:
        query = tl.load(place.to(tl.pointer_type(tl.float8e4b8 if Q_FNUZ else tl.float8e4nv)))
    elif Q_FP8:
        query = fp8_values(tl.load(place), Q_FNUZ)
    else:
        query = tl.load(place).to(tl.float32)
    weight = tl.load(weights + token * weight_stride + head)
    for begin in range(first, tl.minimum(first + SPAN, seen), KEYS):
        number = begin + tl.arange(0, KEYS)
        if WHOLE:  # one page, and no division for each key
            column = begin // page_size
            page = tl.load(table + column, mask=column < pages, other=-1) + tl.zeros_like(number)
            offset = begin % page_size + tl.arange(0, KEYS)
        else:
            column = number // page_size
            page = tl.load(table + column, mask=(number < seen) & (column < pages), other=-1)
            offset = number % page_size
        wanted = (number < seen) & (page >= 0)
        keys, factor = load_rows(
            page, offset, wanted, pool, page_stride, page_size, scale, FORMAT, FNUZ, WIDTH, NATIVE
        )
        score = tl.dot(keys.to(query.dtype), query, input_precision="ieee")
        summed = tl.sum(tl.maximum(score, 0.0, tl.PropagateNan.ALL) * weight[None, :], axis=1)
        tl.store(row + number, tl.where(wanted, summed * factor, float("-inf")), mask=number < seen)
