"""`compress` in kernels. Groups are pooled from what earlier steps left, before states are replaced.

A group that fits into one program is stored by it; where all requests decode, so are a request's states.
Otherwise a second kernel stores states, and the rows of groups that several programs have pooled.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4core.api.model import LayerKind
from dsv4core.api.step import Step
from dsv4core.kvcache import KVCache
from dsv4core.kvcache.codecs_triton import cache_arguments, store_row
from dsv4core.model.rope_triton import angles, turned

POOLED = 2048
"""Values, and as many scores, of a program that shares a group: 16 a thread. 32 programs share 128 rows."""
FITS = 4096
"""The most of a program that has a group to itself. Each of its rows is summed as one, whatever the step."""
MANY = 1024
"""Tokens from which on a program looks at several: few of them complete a group, or have to be kept."""


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
    if projected.stride(0) % 4 or projected.data_ptr() % 16:  # rows are loaded 16 bytes at a time
        projected = projected.clone(memory_format=torch.contiguous_format)
    width = projected.shape[1] // (2 * kind.groups)
    states, table = step.state[kind.name], step.compressed[kind.name]
    source = {
        "projected": projected,
        "ape": ape,
        "token_stride": projected.stride(0),
        "positions": step.positions,
        "token_to_request": step.token_to_request,
        "query_start_loc": step.query_start_loc,
        "entry_slots": table.slot_mapping,
        "state_table": states.block_table,
        "table_stride": states.block_table.stride(0),
        "state_pool": state.pool.view(torch.uint8),
        "state_page_stride": state.page_stride_bytes,
        "state_page_size": state.page_size,
        "GROUPS": kind.groups,
        "RATIO": kind.ratio,
        "WIDTH": width,
    }
    target = {
        "state_slots": states.slot_mapping,
        "norm_weight": norm_weight,
        "rope": rope,
        "eps": eps,
        **cache_arguments(entries),
        "ROPE": rope.shape[1],
        "enable_fp_fusion": False,
    }
    group = kind.state_window * width
    if group <= FITS and step.num_decode_requests == step.num_requests:
        _pool_and_keep[(tokens,)](**source, **target, num_warps=_warps(group))
        return
    several = tokens > MANY
    channels = width if group <= FITS else POOLED // kind.state_window
    pooled = None
    if channels < width:
        pooled = torch.empty(tokens, width, dtype=torch.float32, device=projected.device)
    shared = {**source, **target, "pooled": pooled, "tokens": tokens}
    looked_at = min(kind.ratio, 64) if several else 1
    _pool[(triton.cdiv(tokens, looked_at), width // channels)](
        **_of_kernel(_pool, shared), CHANNELS=channels, TOKENS=looked_at, num_warps=_warps(group)
    )
    kept = 4 if several else 1
    _keep_states[(triton.cdiv(tokens, kept),)](**_of_kernel(_keep_states, shared), TOKENS=kept, num_warps=4)


def _warps(group: int) -> int:
    return 8 if group == FITS else 4


def _of_kernel(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a kernel takes, and options."""
    return {
        name: value for name, value in arguments.items() if name in (*kernel.arg_names, "enable_fp_fusion")
    }


@triton.jit
def _pool_and_keep(
    projected,
    ape,
    token_stride,
    positions,
    token_to_request,
    query_start_loc,
    entry_slots,
    state_table,
    table_stride,
    state_pool,
    state_page_stride,
    state_page_size,
    state_slots,
    norm_weight,
    rope,
    eps,
    pool,
    page_stride,
    page_size,
    scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    request = tl.maximum(tl.load(token_to_request + token), 0).to(tl.int64)  # padding may have none
    position, slot = tl.load(positions + token), tl.load(entry_slots + token)
    state_slot = tl.load(state_slots + token)
    begin, end = tl.load(query_start_loc + request), tl.load(query_start_loc + request + 1)
    if (token != begin) | (begin == end):  # the program of the first token has all of the request's
        return
    channel, pages = tl.arange(0, WIDTH), state_table + request * table_stride
    # One latency for all that the first token needs: it is mostly the only one.
    value, score = _state(projected, ape, token_stride, token, position, GROUPS, RATIO, WIDTH)
    norm = tl.load(norm_weight + channel).to(tl.float32)
    cos, sin = angles(rope, position // RATIO * RATIO, WIDTH, ROPE)
    for other in range(token, end):
        if other > token:
            slot, position = tl.load(entry_slots + other), tl.load(positions + other)
            cos, sin = angles(rope, position // RATIO * RATIO, WIDTH, ROPE)
        if slot >= 0:
            row = _pooled(
                *(projected, ape, token_stride, other, position, begin, channel),
                *(pages, state_pool, state_page_stride, state_page_size, GROUPS, RATIO, WIDTH),
            )
            entry = _entry(row, norm, cos, sin, eps, WIDTH, ROPE)
            store_row(entry, slot, pool, page_stride, page_size, scale, FORMAT, FNUZ, WIDTH)
    tl.debug_barrier()  # all of this request's states are read
    _keep(value, score, state_slot, state_pool, state_page_stride, state_page_size, GROUPS, WIDTH)
    for other in range(token + 1, end):
        value, score = _state(
            projected, ape, token_stride, other, tl.load(positions + other), GROUPS, RATIO, WIDTH
        )
        _keep(
            *(value, score, tl.load(state_slots + other)),
            *(state_pool, state_page_stride, state_page_size, GROUPS, WIDTH),
        )


@triton.jit
def _pool(
    projected,
    ape,
    token_stride,
    positions,
    token_to_request,
    query_start_loc,
    entry_slots,
    state_table,
    table_stride,
    state_pool,
    state_page_stride,
    state_page_size,
    pooled,
    tokens,
    norm_weight,
    rope,
    eps,
    pool,
    page_stride,
    page_size,
    scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    number = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here = number < tokens
    slots = tl.load(entry_slots + number, mask=here, other=-1)
    places = tl.load(positions + number, mask=here, other=0)
    requests = tl.load(token_to_request + number, mask=here, other=0).to(tl.int64)
    for turn in range(tl.sum((slots >= 0).to(tl.int32))):
        this = _turn(slots >= 0, turn)
        token, position, request = _of(number, this), _of(places, this), _of(requests, this)
        row = _pooled(
            *(projected, ape, token_stride, token, position, tl.load(query_start_loc + request), channel),
            *(state_table + request * table_stride, state_pool, state_page_stride, state_page_size),
            *(GROUPS, RATIO, WIDTH),
        )
        if pooled is None:
            norm = tl.load(norm_weight + channel).to(tl.float32)
            cos, sin = angles(rope, position // RATIO * RATIO, WIDTH, ROPE)
            entry = _entry(row, norm, cos, sin, eps, WIDTH, ROPE)
            store_row(entry, _of(slots, this), pool, page_stride, page_size, scale, FORMAT, FNUZ, WIDTH)
        else:
            tl.store(pooled + token * WIDTH + channel, row)


@triton.jit
def _keep_states(
    projected,
    ape,
    token_stride,
    positions,
    entry_slots,
    state_pool,
    state_page_stride,
    state_page_size,
    pooled,
    tokens,
    state_slots,
    norm_weight,
    rope,
    eps,
    pool,
    page_stride,
    page_size,
    scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here = number < tokens
    state_of = tl.load(state_slots + number, mask=here, other=-1)
    places = tl.load(positions + number, mask=here, other=0)
    for turn in range(tl.sum((state_of >= 0).to(tl.int32))):
        this = _turn(state_of >= 0, turn)
        value, score = _state(
            *(projected, ape, token_stride, _of(number, this), _of(places, this), GROUPS, RATIO, WIDTH)
        )
        _keep(
            *(value, score, _of(state_of, this)),
            *(state_pool, state_page_stride, state_page_size, GROUPS, WIDTH),
        )
    if pooled is not None:
        channel = tl.arange(0, WIDTH)
        slots = tl.load(entry_slots + number, mask=here, other=-1)
        for turn in range(tl.sum((slots >= 0).to(tl.int32))):
            this = _turn(slots >= 0, turn)
            row = tl.load(pooled + _of(number, this) * WIDTH + channel)
            norm = tl.load(norm_weight + channel).to(tl.float32)
            cos, sin = angles(rope, _of(places, this) // RATIO * RATIO, WIDTH, ROPE)
            entry = _entry(row, norm, cos, sin, eps, WIDTH, ROPE)
            store_row(entry, _of(slots, this), pool, page_stride, page_size, scale, FORMAT, FNUZ, WIDTH)


@triton.jit
def _turn(wanted, turn):
    """Marks the one of those that are wanted that has its turn."""
    return wanted & (tl.cumsum(wanted.to(tl.int32), axis=0) == turn + 1)


@triton.jit
def _of(values, this):
    """The value that is marked."""
    return tl.sum(tl.where(this, values, 0), axis=0)


@triton.jit
def _pooled(
    projected,
    ape,
    token_stride,
    token,
    position,
    begin,
    channel,
    pages,
    state_pool,
    state_page_stride,
    state_page_size,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Channels of the group that a token completes. Rows before its request's token `begin` are states."""
    row = tl.arange(0, GROUPS * RATIO)
    back = GROUPS * RATIO - 1 - row
    column = (row // RATIO * WIDTH)[:, None] + channel[None, :]
    fresh, there = token - back >= begin, position - back >= 0
    place = tl.maximum(position - back, 0)
    page = tl.load(pages + place // state_page_size, mask=there & ~fresh, other=0)
    base = state_pool + page.to(tl.int64) * state_page_stride
    base += (place % state_page_size) * (2 * GROUPS * WIDTH * 4)
    kept = base.to(tl.pointer_type(tl.float32))
    source = tl.multiple_of(tl.where(fresh, projected + (token - back) * token_stride, kept), [16])
    source = source[:, None] + column
    value = tl.load(source, mask=there[:, None], other=0.0)
    score = tl.load(source + GROUPS * WIDTH, mask=there[:, None], other=float("-inf"))
    # A state's score has it already.
    bias = ape + (row % RATIO)[:, None] * (GROUPS * WIDTH) + column
    score += tl.load(bias, mask=fresh[:, None], other=0.0)
    weight = tl.exp(score - tl.max(score, axis=0)[None, :])
    return tl.sum(weight * value, axis=0) / tl.sum(weight, axis=0)


@triton.jit
def _entry(row, norm, cos, sin, eps, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """A pooled row, normalised and rotated."""
    row = row * tl.rsqrt(tl.sum(row * row, axis=0) / WIDTH + eps) * norm
    return tl.reshape(turned(row[None, :], cos[None, :], sin[None, :], 1, WIDTH, ROPE), (WIDTH,))


@triton.jit
def _state(
    projected,
    ape,
    token_stride,
    token,
    position,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A token's values, and its scores with what its place in the group adds."""
    channel = tl.arange(0, GROUPS * WIDTH)
    source = projected + token * token_stride + channel
    bias = tl.load(ape + tl.maximum(position, 0) % RATIO * (GROUPS * WIDTH) + channel)
    return tl.load(source), tl.load(source + GROUPS * WIDTH) + bias


@triton.jit
def _keep(value, score, slot, pool, page_stride, page_size, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Store a token's state, if it has a slot."""
    if slot >= 0:
        base = pool + (slot // page_size) * page_stride + (slot % page_size) * (2 * GROUPS * WIDTH * 4)
        target = base.to(tl.pointer_type(tl.float32)) + tl.arange(0, GROUPS * WIDTH)
        tl.store(target, value)
        tl.store(target + GROUPS * WIDTH, score)
