"""`compress` in two kernels: entries are pooled from what earlier steps left, before states are replaced."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4core.api.model import LayerKind
from dsv4core.api.step import Step
from dsv4core.kvcache import KVCache
from dsv4core.kvcache.codecs_triton import cache_arguments, store_row
from dsv4core.model.rope_triton import rotated

ROWS = 8
"""Rows of a group that are read at a time: 8 x 512 values and scores are 32 KB in flight."""


def compress(
    projected: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    rope: torch.Tensor,
    eps: float,
    kind: LayerKind,
    step: Step,
    state: KVCache,
    entries: KVCache,
) -> None:
    """As the definition; widths are powers of two, and `projected` and `ape` fp32."""
    tokens = projected.shape[0]
    if tokens == 0:
        return
    assert kind.ratio is not None
    width = projected.shape[1] // (2 * kind.groups)
    states, table = step.state[kind.name], step.compressed[kind.name]
    sizes = {"GROUPS": kind.groups, "RATIO": kind.ratio, "WIDTH": width}
    pool = state.pool.view(torch.uint8)
    _pool_entries[(tokens,)](
        projected,
        ape,
        norm_weight,
        rope,
        step.positions,
        step.token_to_request,
        step.query_start_loc,
        table.slot_mapping,
        states.block_table,
        pool,
        projected.stride(0),
        states.block_table.stride(0),
        state.page_stride_bytes,
        state.page_size,
        eps,
        **{
            f"entry_{name}" if name.islower() else name: value
            for name, value in cache_arguments(entries).items()
        },
        **sizes,
        ROWS=min(ROWS, kind.state_window),
        ROPE=rope.shape[1],
        num_warps=8 if width > 128 else 4,
    )
    _store_states[(tokens,)](
        projected,
        ape,
        step.positions,
        states.slot_mapping,
        pool,
        projected.stride(0),
        state.page_stride_bytes,
        state.page_size,
        **sizes,
        num_warps=4,
    )


@triton.jit
def _pool_entries(
    projected,
    ape,
    norm_weight,
    rope,
    positions,
    token_to_request,
    query_start_loc,
    entry_slots,
    state_table,
    state_pool,
    token_stride,
    table_stride,
    state_page_stride,
    state_page_size,
    eps,
    entry_pool,
    entry_page_stride,
    entry_page_size,
    entry_scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROPE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(entry_slots + token)
    if slot < 0:
        return
    position = tl.load(positions + token)
    request = tl.load(token_to_request + token)
    begin = tl.load(query_start_loc + request)
    column = tl.arange(0, WIDTH)[None, :]
    highest = tl.full((WIDTH,), float("-inf"), tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    pooled = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, GROUPS * RATIO, ROWS):
        row = first + tl.arange(0, ROWS)
        back = GROUPS * RATIO - 1 - row
        place = position - back
        in_step = token - back >= begin
        cached = (place >= 0) & (token - back < begin)
        channel = (row // RATIO * WIDTH)[:, None] + column
        fresh = projected + (token - back)[:, None] * token_stride + channel
        value = tl.load(fresh, mask=in_step[:, None], other=0.0)
        score = tl.load(fresh + GROUPS * WIDTH, mask=in_step[:, None], other=float("-inf"))
        score += tl.load(ape + (row % RATIO)[:, None] * (GROUPS * WIDTH) + channel)
        page = tl.load(state_table + request * table_stride + place // state_page_size, mask=cached, other=0)
        base = state_pool + page.to(tl.int64) * state_page_stride
        base += (place % state_page_size) * (2 * GROUPS * WIDTH * 4)
        left = base.to(tl.pointer_type(tl.float32))[:, None] + channel
        value = tl.where(cached[:, None], tl.load(left, mask=cached[:, None], other=0.0), value)
        kept = tl.load(left + GROUPS * WIDTH, mask=cached[:, None], other=float("-inf"))
        score = tl.where(cached[:, None], kept, score)
        # The newest row is in the last block, and each block has one that exists or is all minus infinity.
        higher = tl.maximum(highest, tl.max(score, axis=0))
        lowest = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - lowest[None, :])
        faded = tl.exp(highest - lowest)
        total = total * faded + tl.sum(weight, axis=0)
        pooled = pooled * faded + tl.sum(weight * value, axis=0)
        highest = higher
    pooled = pooled / total
    mean = tl.sum(pooled * pooled, axis=0) / WIDTH
    pooled = pooled * tl.rsqrt(mean + eps) * tl.load(norm_weight + tl.arange(0, WIDTH)).to(tl.float32)
    first_position = position // RATIO * RATIO
    entry = tl.reshape(rotated(pooled[None, :], rope, first_position, 1, WIDTH, ROPE), (WIDTH,))
    store_row(entry, slot, entry_pool, entry_page_stride, entry_page_size, entry_scale, FORMAT, FNUZ, WIDTH)


@triton.jit
def _store_states(
    projected,
    ape,
    positions,
    slots,
    pool,
    token_stride,
    page_stride,
    page_size,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    channel = tl.arange(0, GROUPS * WIDTH)
    source = projected + token * token_stride + channel
    place = tl.load(positions + token) % RATIO
    score = tl.load(source + GROUPS * WIDTH) + tl.load(ape + place * (GROUPS * WIDTH) + channel)
    base = pool + (slot // page_size) * page_stride + (slot % page_size) * (2 * GROUPS * WIDTH * 4)
    target = base.to(tl.pointer_type(tl.float32)) + channel
    tl.store(target, tl.load(source))
    tl.store(target + GROUPS * WIDTH, score)
