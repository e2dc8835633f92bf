"""Sparse attention in place: rows are read from the paged pools as they are attended, for decode and prefill.

A program attends for some heads of one token, over a part of its columns; where there are several parts, a
second kernel merges them. Lengths are read on the device, so that a captured graph divides each row evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4core.api.errors import ConfigError
from dsv4core.fp8_triton import bf16_of_codes, converts_packed, fp8_values
from dsv4core.kvcache.codecs_triton import cache_arguments
from dsv4core.ops.sparse_mla.reference import Pool, Rows

HEADS = 64
"""Most heads of one program: its sums are 64 x 512 in registers."""
FEW_HEADS = 16
"""Most of them in fp32, and on chips like sm_86 with 99 KB of shared memory: 64 and keys take 128 KB."""
KEYS = 32
"""Rows that are attended at a time."""
MOST_SPLITS = 16
SHIFT = 60
"""Packed rows are decoded times 2^-60 where two codes are converted at once: bf16 holds any of them."""
NOTHING = (None, None, None, 0, 0, 0, None, 0, 1, None, 0, False)
"""Arguments of a pool that is not there."""


def sparse_mla(
    q: torch.Tensor,
    pools: Sequence[Rows | Pool],
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
    want_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the definition, for one pool or two, and rows whose width is a power of two.

    Keys are rounded to the dtype of `q`, or to bf16 for an FP8 one. A packed row with a scale of 2^68 or more
    is taken as NaN.

    Raises:
        ConfigError: There are more than two pools.
    """
    tokens, heads, width = q.shape
    dtype = torch.bfloat16 if q.itemsize == 1 else q.dtype
    out = torch.empty(tokens, heads, width, dtype=dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if want_lse else None
    if tokens == 0:
        return out, lse
    rows = [Rows(*own) for own in pools]
    if not 1 <= len(rows) <= 2:
        raise ConfigError(f"{len(rows)} pools were given, and this kernel attends one or two.")
    keys = KEYS if dtype.itemsize == 2 else KEYS // 2
    block = min(_most_heads(q.device, dtype), max(16, triton.next_power_of_2(heads)))
    blocks = triton.cdiv(heads, block)
    splits = _splits(tokens * blocks, sum(own.slots.shape[1] for own in rows), q.device)
    parts, part_lse = out, lse
    if splits > 1:
        parts = torch.empty(splits, tokens, heads, width, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(splits, tokens, heads, dtype=torch.float32, device=q.device)
    packed = all((own.cache.format.name, own.cache.format.fp8) == ("fp8_ds_mla", "e4m3fn") for own in rows)
    _attend[(tokens, blocks, splits)](
        q,
        parts,
        part_lse,
        sinks if splits == 1 else None,
        heads,
        q.stride(0),
        q.stride(1),
        softmax_scale,
        *_arguments(rows[0]),
        *(_arguments(rows[1]) if len(rows) > 1 else NOTHING),
        HEADS=block,
        KEYS=keys,
        WIDTH=width,
        SHIFT=SHIFT if packed and converts_packed(q.device) and dtype == torch.bfloat16 else 0,
        num_warps=8 if block > FEW_HEADS else 4,
        num_stages=1,
    )
    if splits > 1:
        _merge[(tokens, heads)](
            parts, part_lse, sinks, out, lse, splits, heads, MOST=MOST_SPLITS, WIDTH=width, num_warps=4
        )
    return out, lse


def _arguments(rows: Rows) -> tuple[Any, ...]:
    cache = cache_arguments(rows.cache)
    places = (rows.slots, rows.lengths, rows.table_rows, *rows.slots.shape, rows.slots.stride(0))
    return (*places, *cache.values())


def _splits(programs: int, columns: int, device: torch.device) -> int:
    """Parts of a row: enough programs for all processors, each with at least two tiles."""
    most = max(1, min(MOST_SPLITS, columns // (2 * KEYS)))
    return max(1, min(most, _processors(device) // programs))


def _most_heads(device: torch.device, dtype: torch.dtype) -> int:
    if dtype == torch.float32:
        return FEW_HEADS
    if device.type != "cuda" or torch.version.hip is not None:
        return HEADS
    index = torch.cuda.current_device() if device.index is None else device.index
    shared = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return HEADS if shared >= 132 << 10 else FEW_HEADS


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _attend(
    q,
    out,
    lse,
    sinks,
    heads,
    q_token,
    q_head,
    softmax_scale,
    slots,
    lengths,
    table_rows,
    height,
    columns,
    slot_stride,
    pool,
    page_stride,
    page_size,
    scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    more_slots,
    more_lengths,
    more_table_rows,
    more_height,
    more_columns,
    more_slot_stride,
    more_pool,
    more_page_stride,
    more_page_size,
    more_scale,
    MORE_FORMAT: tl.constexpr,
    MORE_FNUZ: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
):
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, WIDTH)
    here = head < heads
    place = token * q_token + head[:, None] * q_head + channel[None, :]
    query = tl.load(q + place, mask=here[:, None], other=0.0)
    if query.dtype.primitive_bitwidth == 8:
        query = query.to(tl.bfloat16)
    # Scores to the base of 2.
    factor = softmax_scale * (1.4426950408889634 * 2.0**SHIFT)
    highest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    summed = tl.zeros((HEADS, WIDTH), tl.float32)
    length, first, last = _part(lengths, columns, token, split, KEYS)
    row = _row(slots, table_rows, token, height, slot_stride)
    for begin in range(first, last, KEYS):
        slot, wanted = _slots(row, begin, length, KEYS)
        rows = _rows(
            slot, wanted, pool, page_stride, page_size, scale, FORMAT, FNUZ, KEYS, WIDTH, SHIFT, query.dtype
        )
        highest, total, summed = _attended(query, rows, wanted, factor, highest, total, summed)
    if more_slots is not None:
        length, first, last = _part(more_lengths, more_columns, token, split, KEYS)
        row = _row(more_slots, more_table_rows, token, more_height, more_slot_stride)
        for begin in range(first, last, KEYS):
            slot, wanted = _slots(row, begin, length, KEYS)
            rows = _rows(
                slot,
                wanted,
                more_pool,
                more_page_stride,
                more_page_size,
                more_scale,
                MORE_FORMAT,
                MORE_FNUZ,
                KEYS,
                WIDTH,
                SHIFT,
                query.dtype,
            )
            highest, total, summed = _attended(query, rows, wanted, factor, highest, total, summed)
    target = (split * tl.num_programs(0) + token) * heads + head
    if lse is not None:
        tl.store(lse + target, (highest + tl.log2(tl.maximum(total, 1e-37))) * 0.6931471805599453, mask=here)
    divisor, faded = total, tl.full((HEADS,), 1.0, tl.float32)
    if sinks is not None:
        divisor, faded = _with_sink(highest, total, tl.load(sinks + head, mask=here, other=float("-inf")))
    result = summed * (faded * 2.0**SHIFT / tl.where(divisor > 0, divisor, 1.0))[:, None]
    tl.store(
        out + target[:, None] * WIDTH + channel[None, :], result.to(out.dtype.element_ty), mask=here[:, None]
    )


@triton.jit
def _part(lengths, columns, token, split, KEYS: tl.constexpr):
    """A query's columns, and those of them that are a split's: whole tiles, as many for each."""
    length = columns
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + token).to(tl.int32), columns)
    tiles, splits = tl.cdiv(length, KEYS), tl.num_programs(2)
    return length, tiles * split // splits * KEYS, tiles * (split + 1) // splits * KEYS


@triton.jit
def _row(slots, table_rows, token, height, stride):
    """Where a query's slots lie. Rows of padding may name requests that the step has not."""
    row = token
    if table_rows is not None:
        row = tl.minimum(tl.maximum(tl.load(table_rows + token), 0), height - 1).to(tl.int64)
    return slots + row * stride


@triton.jit
def _slots(row, begin, length, KEYS: tl.constexpr):
    column = begin + tl.arange(0, KEYS)
    slot = tl.load(row + column, mask=column < length, other=-1)
    return slot, slot >= 0


@triton.jit
def _rows(
    slot,
    wanted,
    pool,
    page_stride,
    page_size,
    scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The rows `[KEYS, WIDTH]` times 2^-SHIFT, zeros where none is wanted."""
    known = tl.where(wanted, slot, 0)
    page = pool + (known // page_size).to(tl.int64) * page_stride
    offset, column, here = known % page_size, tl.arange(0, WIDTH)[None, :], wanted[:, None]
    if FORMAT == 0:
        tile = tl.arange(0, WIDTH // 64)
        base = page + offset * (WIDTH + 64)
        scales = page + (page_size * (WIDTH + 64) + offset * 8)
        exponent = tl.load(scales[:, None] + tile[None, :], mask=here, other=0)
        codes = tl.load(base[:, None] + column, mask=here & (column < WIDTH - 64), other=0)
        rotary = (base + (WIDTH - 64)).to(tl.pointer_type(tl.bfloat16))[:, None] + (column - (WIDTH - 64))
        turned = tl.load(rotary, mask=here & (column >= WIDTH - 64), other=0.0)
        if SHIFT:
            bits = (exponent.to(tl.uint16) + (120 - SHIFT)) << 7
            factor = (
                tl.where(exponent > 134 + SHIFT, 0x7FC0, bits).to(tl.uint16).to(tl.bfloat16, bitcast=True)
            )
            tiles = tl.reshape(bf16_of_codes(codes), (KEYS, WIDTH // 64, 64)) * factor[:, :, None]
            # Not a float: Triton 3.6 makes 0 of a bf16 constant of 2^-60.
            tiny = tl.full((1, WIDTH), (127 - SHIFT) << 7, tl.uint16).to(tl.bfloat16, bitcast=True)
            turned = turned * tiny
        else:
            factor = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            factor = tl.where(exponent == 255, float("nan"), tl.where(exponent == 0, 2.0**-127, factor))
            tiles = tl.reshape(fp8_values(codes, FNUZ).to(tl.float32), (KEYS, WIDTH // 64, 64))
            tiles *= factor[:, :, None]
        rows = tl.where(column < WIDTH - 64, tl.reshape(tiles, (KEYS, WIDTH)).to(DTYPE), turned.to(DTYPE))
    elif FORMAT == 1:
        halves = (page + offset * (2 * WIDTH)).to(tl.pointer_type(tl.bfloat16))[:, None] + column
        rows = tl.load(halves, mask=here, other=0.0).to(DTYPE)
    elif FORMAT == 3:
        floats = (page + offset * (4 * WIDTH)).to(tl.pointer_type(tl.float32))[:, None] + column
        rows = tl.load(floats, mask=here, other=0.0).to(DTYPE)
    else:
        codes = tl.load((page + offset * WIDTH)[:, None] + column, mask=here, other=0)
        values = fp8_values(codes, FNUZ).to(tl.float32)
        if scale is not None:
            values *= tl.load(scale)
        rows = values.to(DTYPE)
    return rows


@triton.jit
def _attended(query, rows, wanted, factor, highest, total, summed):
    """The running softmax over one tile more. Maxima are those of scores to the base of 2."""
    score = tl.dot(query, tl.trans(rows), input_precision="ieee")
    score = tl.where(wanted[None, :], score * factor, float("-inf"))
    higher = tl.maximum(highest, tl.max(score, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - base[:, None])
    faded = tl.exp2(highest - base)
    total = total * faded + tl.sum(weight, axis=1)
    summed = tl.dot(weight.to(rows.dtype), rows, summed * faded[:, None], input_precision="ieee")
    return higher, total, summed


@triton.jit
def _with_sink(highest, total, sink):
    """The sum of weights with that of the sink, and by how much the other weights fade."""
    sink = tl.minimum(tl.maximum(sink.to(tl.float32) * 1.4426950408889634, -3e38), 3e38)
    top = tl.maximum(highest, sink)
    faded = tl.exp2(highest - top)
    return total * faded + tl.exp2(sink - top), faded


@triton.jit
def _merge(parts, part_lse, sinks, out, lse, splits, heads, MOST: tl.constexpr, WIDTH: tl.constexpr):
    """Each part is normalised by itself: its log-sum-exp is its weight."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, channel = tl.arange(0, MOST), tl.arange(0, WIDTH)
    row = (part * tl.num_programs(0) + token) * heads + head
    known = part < splits
    own = tl.load(part_lse + row, mask=known, other=float("-inf"))
    highest = tl.max(own, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp(own - base)
    total = tl.sum(weight, axis=0)
    values = tl.load(parts + row[:, None] * WIDTH + channel[None, :], mask=known[:, None], other=0.0)
    summed = tl.sum(values * weight[:, None], axis=0)
    target = token * heads + head
    if lse is not None:
        tl.store(lse + target, highest + tl.log(tl.maximum(total, 1e-37)))
    divisor, faded = total, 1.0
    if sinks is not None:
        sink = tl.load(sinks + head)
        divisor, faded = _with_sink(base * 1.4426950408889634, total, sink)
    result = summed * (faded / tl.where(divisor > 0, divisor, 1.0))
    tl.store(out + target * WIDTH + channel, result.to(out.dtype.element_ty))
