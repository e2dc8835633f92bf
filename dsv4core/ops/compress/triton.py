"""`compress` in two kernels: groups are pooled from what earlier steps left, before states are replaced."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4core.api.model import LayerKind
from dsv4core.api.step import Step
from dsv4core.kvcache import KVCache
from dsv4core.kvcache.codecs_triton import cache_arguments, store_row
from dsv4core.model.rope_triton import rotated

POOLED = 8192
"""Values, and as many scores, that a program pools: 64 a thread. 8 programs share a group of 128 rows."""
MANY = 1024
"""Tokens from which on a program looks at several: few of them complete a group."""


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
    """As the definition; widths and rows of a group are powers of two, and `projected` and `ape` fp32."""
    tokens = projected.shape[0]
    if tokens == 0:
        return
    assert kind.ratio is not None
    width = projected.shape[1] // (2 * kind.groups)
    states, table = step.state[kind.name], step.compressed[kind.name]
    pooled = torch.empty(tokens, width, dtype=torch.float32, device=projected.device)
    channels = min(width, POOLED // kind.state_window)
    looked_at = min(kind.ratio, 16) if tokens > MANY else 1
    sizes = {"GROUPS": kind.groups, "RATIO": kind.ratio, "WIDTH": width}
    pool = state.pool.view(torch.uint8)
    _pool[(triton.cdiv(tokens, looked_at), width // channels)](
        projected,
        ape,
        pooled,
        step.positions,
        step.token_to_request,
        step.query_start_loc,
        table.slot_mapping,
        states.block_table,
        pool,
        tokens,
        projected.stride(0),
        states.block_table.stride(0),
        state.page_stride_bytes,
        state.page_size,
        **sizes,
        CHANNELS=channels,
        TOKENS=looked_at,
        num_warps=4,
    )
    _store[(tokens,)](
        projected,
        ape,
        pooled,
        norm_weight,
        rope,
        step.positions,
        states.slot_mapping,
        table.slot_mapping,
        pool,
        projected.stride(0),
        state.page_stride_bytes,
        state.page_size,
        eps,
        **{
            f"entry_{name}" if name.islower() else name: value
            for name, value in cache_arguments(entries).items()
        },
        **sizes,
        ROPE=rope.shape[1],
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit
def _pool(
    projected,
    ape,
    pooled,
    positions,
    token_to_request,
    query_start_loc,
    entry_slots,
    state_table,
    state_pool,
    tokens,
    token_stride,
    table_stride,
    state_page_stride,
    state_page_size,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.arange(0, GROUPS * RATIO)
    back = GROUPS * RATIO - 1 - row
    column = (row // RATIO * WIDTH)[:, None] + channel[None, :]
    for offset in range(TOKENS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + offset
        slot = tl.load(entry_slots + token, mask=token < tokens, other=-1)
        if slot >= 0:
            request = tl.load(token_to_request + token).to(tl.int64)
            place = tl.load(positions + token) - back
            fresh = token - back >= tl.load(query_start_loc + request)
            kept = (place >= 0) & (token - back < tl.load(query_start_loc + request))
            source = projected + (token - back)[:, None] * token_stride + column
            value = tl.load(source, mask=fresh[:, None], other=0.0)
            score = tl.load(source + GROUPS * WIDTH, mask=fresh[:, None], other=float("-inf"))
            score += tl.load(ape + (row % RATIO)[:, None] * (GROUPS * WIDTH) + column)
            page = tl.load(
                state_table + request * table_stride + place // state_page_size, mask=kept, other=0
            )
            base = state_pool + page.to(tl.int64) * state_page_stride
            base += (place % state_page_size) * (2 * GROUPS * WIDTH * 4)
            left = base.to(tl.pointer_type(tl.float32))[:, None] + column
            value = tl.where(kept[:, None], tl.load(left, mask=kept[:, None], other=0.0), value)
            left_score = tl.load(left + GROUPS * WIDTH, mask=kept[:, None], other=float("-inf"))
            score = tl.where(kept[:, None], left_score, score)
            weight = tl.exp(score - tl.max(score, axis=0)[None, :])
            mean = tl.sum(weight * value, axis=0) / tl.sum(weight, axis=0)
            tl.store(pooled + token * WIDTH + channel, mean)


@triton.jit
def _store(
    projected,
    ape,
    pooled,
    norm_weight,
    rope,
    positions,
    state_slots,
    entry_slots,
    pool,
    token_stride,
    page_stride,
    page_size,
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
    ROPE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    slot = tl.load(state_slots + token)
    if slot >= 0:
        channel = tl.arange(0, GROUPS * WIDTH)
        source = projected + token * token_stride + channel
        score = tl.load(source + GROUPS * WIDTH) + tl.load(
            ape + position % RATIO * (GROUPS * WIDTH) + channel
        )
        base = pool + (slot // page_size) * page_stride + (slot % page_size) * (2 * GROUPS * WIDTH * 4)
        target = base.to(tl.pointer_type(tl.float32)) + channel
        tl.store(target, tl.load(source))
        tl.store(target + GROUPS * WIDTH, score)
    entry_slot = tl.load(entry_slots + token)
    if entry_slot >= 0:
        column = tl.arange(0, WIDTH)
        row = tl.load(pooled + token * WIDTH + column)
        mean = tl.sum(row * row, axis=0) / WIDTH
        row = row * tl.rsqrt(mean + eps) * tl.load(norm_weight + column).to(tl.float32)
        entry = rotated(row[None, :], rope, position // RATIO * RATIO, 1, 1, WIDTH, ROPE)
        store_row(
            tl.reshape(entry, (WIDTH,)),
            entry_slot,
            entry_pool,
            entry_page_stride,
            entry_page_size,
            entry_scale,
            FORMAT,
            FNUZ,
            WIDTH,
        )
