"""`gather_rows` in one launch: each program decodes some rows of a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4core.kvcache import KVCache
from dsv4core.kvcache.codecs_triton import cache_arguments
from dsv4core.kvcache.tiles_triton import decoded, fetched

ROWS = 16
"""Rows of one program: 8,192 values."""


def gather_rows(
    cache: KVCache,
    block_table: torch.Tensor,
    first: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """As the definition, for rows whose width is a power of two."""
    (requests, pages), (_, height, width) = block_table.shape, out.shape
    if out.numel():
        own = cache_arguments(cache)
        _gather_rows[(triton.cdiv(height, ROWS), requests)](  # the second of a grid is 65,535 at most
            *(own[name] for name in ("pool", "page_stride", "scale")),
            *(block_table, block_table.stride(0), pages, first, count),
            *(out, out.stride(0), out.stride(1), height),
            FORMAT=own["FORMAT"],
            FNUZ=own["FNUZ"],
            PAGE_SIZE=cache.page_size,
            ROWS=ROWS,
            WIDTH=width,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["pages", "height"])
def _gather_rows(
    pool,
    page_stride,
    scale,
    block_table,
    table_stride,
    pages,
    first,
    count,
    out,
    request_stride,
    row_stride,
    height,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    request, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    number = (tl.load(first + request) + row).to(tl.int32)
    here = (row < tl.load(count + request)) & (row < height) & (number // PAGE_SIZE < pages)
    table = block_table + request.to(tl.int64) * table_stride
    page = tl.load(table + number // PAGE_SIZE, mask=here, other=-1)
    slot = tl.where(page >= 0, page * PAGE_SIZE + number % PAGE_SIZE, -1)
    mine = request >= 0  # all of them: there is no second pool
    codes, exponent, rotated = fetched(
        *(slot, mine, pool, page_stride, pool, page_stride, FORMAT, PAGE_SIZE, PAGE_SIZE, ROWS, WIDTH)
    )
    values, _ = decoded(
        *(codes, exponent, rotated, mine, scale, scale),
        *(FORMAT, FNUZ, 0, False, ROWS, WIDTH, out.dtype.element_ty),
    )
    place = request.to(tl.int64) * request_stride + row * row_stride
    tl.store(out + place[:, None] + tl.arange(0, WIDTH)[None, :], values, mask=(slot >= 0)[:, None])
