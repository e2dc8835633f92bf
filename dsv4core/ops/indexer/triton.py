"""The indexer in kernels: scores of all visible entries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4core.api.step import CacheTable
from dsv4core.kvcache import KVCache
from dsv4core.kvcache.codecs_triton import cache_arguments, fp8_values, load_rows

KEYS = 64
"""Keys that are multiplied at a time."""
SPAN = 1024
"""Keys of a program, which loads its queries once: 256 programs for a context of 1M tokens."""


def index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: KVCache,
    table: CacheTable,
    token_to_request: torch.Tensor,
    visible: torch.Tensor,
    width: int | None = None,
) -> torch.Tensor:
    """As the definition; `width` columns wide, if given, so that no length is read on the host."""
    tokens, heads, dim = q.shape
    if width is None:
        width = int(visible.max()) if tokens else 0
    logits = torch.empty(tokens, width, dtype=torch.float32, device=q.device)
    if tokens and width:
        _score[(tokens, triton.cdiv(width, SPAN))](
            q.view(torch.uint8) if q.itemsize == 1 else q,
            weights,
            token_to_request,
            visible,
            table.block_table,
            logits,
            width,
            table.block_table.shape[1],
            q.stride(0),
            weights.stride(0),
            table.block_table.stride(0),
            **cache_arguments(keys),
            HEADS=heads,
            WIDTH=dim,
            KEYS=KEYS,
            SPAN=SPAN,
            Q_FP8=q.itemsize == 1,
            num_warps=4,
        )
    return logits


@triton.jit
def _score(
    q,
    weights,
    token_to_request,
    visible,
    block_table,
    logits,
    width,
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
    Q_FP8: tl.constexpr,
):
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * SPAN
    seen = tl.load(visible + token)
    head, channel = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    row = logits + token * width
    request = tl.load(token_to_request + token).to(tl.int64)
    query = tl.load(q + token * q_stride + head[:, None] * WIDTH + channel[None, :])
    query = fp8_values(query, FNUZ) if Q_FP8 else query.to(tl.float32)
    weight = tl.load(weights + token * weight_stride + head)
    for begin in range(first, min(first + SPAN, width), KEYS):
        number = begin + tl.arange(0, KEYS)
        wanted = number < seen
        column = number // page_size
        page = tl.load(
            block_table + request * table_stride + column, mask=wanted & (column < pages), other=-1
        )
        wanted = wanted & (page >= 0)
        slot = page.to(tl.int64) * page_size + number % page_size
        keys, factor = load_rows(slot, wanted, pool, page_stride, page_size, scale, FORMAT, FNUZ, WIDTH)
        score = tl.dot(query, tl.trans(keys).to(query.dtype), input_precision="ieee")
        summed = tl.sum(tl.maximum(score * factor[None, :], 0.0) * weight[:, None], axis=0)
        tl.store(row + number, tl.where(wanted, summed, float("-inf")), mask=number < width)
