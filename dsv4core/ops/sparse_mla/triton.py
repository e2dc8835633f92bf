"""Sparse attention in place: rows are read from the paged pools as they are attended, for decode and prefill.

A program attends for some heads of one token, over a part of its tiles of rows. Parts are merged by a second
kernel. Lengths are read on the device, so that a captured graph divides each row evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from dsv4core.api.errors import ConfigError
from dsv4core.fp8_triton import bf16_of_codes, converts_packed, fp8_values, multiplies_fp8
from dsv4core.kvcache.codecs_triton import cache_arguments
from dsv4core.ops.sparse_mla.reference import Pool, Rows

MOST_SPLITS = 16
MERGED = 8
"""Rows that a program merges: 16 KB are on their way at once."""
SHIFT = 60
"""Packed rows are decoded times 2^-60 where two codes are converted at once: bf16 holds any of them."""


@dataclass(frozen=True)
class Blocks:
    """How a launch is divided.

    Attributes:
        heads: Heads of one program: its sums are `heads` x 512 in registers.
        keys: Rows that are attended at a time.
        warps: Warps of a program.
        stages: Tiles of rows that are on their way.
    """

    heads: int
    keys: int
    warps: int
    stages: int


WIDE = Blocks(heads=64, keys=64, warps=8, stages=2)
"""Takes 192 KB of shared memory."""
MIDDLE = Blocks(heads=64, keys=32, warps=8, stages=2)
"""Takes 130 KB, or 64 on AMD's chips, which keep queries in registers."""
NARROW = Blocks(heads=16, keys=32, warps=4, stages=2)
"""Takes 82 KB."""
TALL = Blocks(heads=16, keys=64, warps=4, stages=2)
"""Takes 144 KB, for bf16 rows, which need no conversion: programs of few heads are more of them."""
NOTHING = (None, None, None, 0, 0, 0, None, 0, None)
"""Arguments of a pool that is not there."""


def sparse_mla(
    q: torch.Tensor,
    pools: Sequence[Rows | Pool],
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
    want_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the definition, for one pool or two, and rows whose width is a power of two.

    Keys are rounded to the dtype of `q`, or to bf16 for an FP8 one. On chips that convert codes with integers
    a packed row with a scale of 2^68 or more is taken as NaN.

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
    blocks = _blocks(tokens, heads, rows[0].cache.format.name == "bf16", q.device, dtype)
    tiles = sum(triton.cdiv(own.slots.shape[1], blocks.keys) for own in rows)
    head_blocks = triton.cdiv(heads, blocks.heads)
    room = _processors(q.device) * (1 if blocks.heads > NARROW.heads else 2)
    splits = _splits(tiles, room // (tokens * head_blocks))
    # One launch attends pools of one format. Others have a launch and parts of their own.
    alike = len({(own.cache.format.name, own.cache.format.fp8) for own in rows}) == 1
    launches = [rows] if alike else [[own] for own in rows]
    parts, part_lse, count = out[None], None if lse is None else lse[None], splits * len(launches)
    if count > 1:
        parts = torch.empty(count, tokens, heads, width, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(count, tokens, heads, dtype=torch.float32, device=q.device)
    for number, own in enumerate(launches):
        first = number * splits
        _attend[(tokens, head_blocks, splits)](
            q,
            parts[first:],
            None if part_lse is None else part_lse[first:],
            sinks if count == 1 else None,
            heads,
            q.stride(0),
            q.stride(1),
            softmax_scale,
            *_arguments(own[0]),
            *(_arguments(own[1]) if len(own) > 1 else NOTHING),
            **_format(own[0], q.device, dtype),
            PAGE_SIZE=own[0].cache.page_size,
            MORE_PAGE_SIZE=own[-1].cache.page_size,
            HEADS=blocks.heads,
            KEYS=blocks.keys,
            WIDTH=width,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    if count > 1:
        assert part_lse is not None
        _merge_parts(parts, part_lse, sinks, out, lse)
    return out, lse


def _merge_parts(
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    count, tokens, heads, width = parts.shape
    padded = triton.next_power_of_2(count)
    own = max(1, MERGED // padded)
    _merge[(tokens, triton.cdiv(heads, own))](
        *(parts, part_lse, sinks, out, lse, count, heads), PARTS=padded, HEADS=own, WIDTH=width, num_warps=4
    )


def _arguments(rows: Rows) -> tuple[Any, ...]:
    cache = cache_arguments(rows.cache)
    places = (rows.slots, rows.lengths, rows.table_rows, *rows.slots.shape, rows.slots.stride(0))
    return (*places, *(cache[name] for name in ("pool", "page_stride", "scale")))


def _format(rows: Rows, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """How the kernel decodes rows."""
    cache, form = cache_arguments(rows.cache), rows.cache.format
    paired = (form.name, form.fp8, dtype) == ("fp8_ds_mla", "e4m3fn", torch.bfloat16)
    whole = multiplies_fp8(device, torch.float8_e4m3fn)  # such a chip converts codes, too
    shift = SHIFT if paired and converts_packed(device) and not whole else 0
    return {"FORMAT": cache["FORMAT"], "FNUZ": cache["FNUZ"], "SHIFT": shift}


def _splits(tiles: int, most: int) -> int:
    """Parts of a row: as few as are as short as those of `most` parts."""
    length = triton.cdiv(tiles, max(1, min(most, MOST_SPLITS)))
    return max(1, triton.cdiv(tiles, max(1, length)))


def _blocks(tokens: int, heads: int, plain: bool, device: torch.device, dtype: torch.dtype) -> Blocks:
    """The division for a call; `plain` rows are bf16."""
    if dtype == torch.float32:
        return replace(NARROW, keys=NARROW.keys // 2)
    shared, narrow = _shared_memory(device), tokens * triton.cdiv(heads, NARROW.heads)
    if plain and shared >= 224 << 10 and (heads <= NARROW.heads or 4 * narrow <= _processors(device)):
        return TALL
    if heads <= NARROW.heads or shared < 132 << 10:
        return NARROW
    return WIDE if shared >= 224 << 10 else MIDDLE


@lru_cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; on AMD's chips as many as `MIDDLE` would take on NVIDIA's."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 132 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    known: int = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return known


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
    scale,
    more_slots,
    more_lengths,
    more_table_rows,
    more_height,
    more_columns,
    more_slot_stride,
    more_pool,
    more_page_stride,
    more_scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    SHIFT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MORE_PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    here = (head < heads)[:, None]
    channel, rotary = tl.arange(0, WIDTH)[None, :], tl.arange(0, 64)[None, :]
    # The 64 rotary channels of packed rows have a product of their own, and none in the other one.
    PLAIN: tl.constexpr = WIDTH - 64 if FORMAT == 0 else WIDTH
    place = q + token * q_token + head[:, None] * q_head
    query = _query(place + channel, here & (channel < PLAIN))
    query_turned = _query(place + PLAIN + rotary, here) if FORMAT == 0 else query

    # Both pools' tiles are one list, so that rows of the next tile are on their way whatever its pool is.
    row, length = _row(slots, lengths, table_rows, token, height, columns, slot_stride)
    tiles = tl.cdiv(length, KEYS)
    if more_slots is None:
        more_row, more_length, second = row, length, pool
        all_tiles = tiles
    else:
        more_row, more_length = _row(
            more_slots, more_lengths, more_table_rows, token, more_height, more_columns, more_slot_stride
        )
        second = more_pool
        all_tiles = tiles + tl.cdiv(more_length, KEYS)
    first, last = all_tiles * split // tl.num_programs(2), all_tiles * (split + 1) // tl.num_programs(2)

    factor = softmax_scale * (1.4426950408889634 * 2.0**SHIFT)  # scores to the base of 2
    highest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    summed = tl.zeros((HEADS, WIDTH), tl.float32)
    summed_turned = tl.zeros((HEADS, 64), tl.float32)
    slot = _slots(first, tiles, row, length, more_row, more_length, KEYS)
    for tile in range(first, last):
        codes, exponent, turned = _loaded(
            *(slot, tile < tiles, pool, page_stride, second, more_page_stride),
            *(FORMAT, PAGE_SIZE, MORE_PAGE_SIZE, KEYS, WIDTH),
        )
        rows, rotated_rows = _decoded(
            *(codes, exponent, turned, tile < tiles, scale, more_scale),
            *(FORMAT, FNUZ, SHIFT, KEYS, WIDTH, query.dtype),
        )
        score = tl.dot(query, tl.trans(rows), input_precision="ieee")
        if FORMAT == 0:
            score = tl.dot(query_turned, tl.trans(rotated_rows), score, input_precision="ieee")
        score = tl.where((slot >= 0)[None, :], score * factor, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        faded = tl.exp2(highest - base)
        total = total * faded + tl.sum(weight, axis=1)
        weight = weight.to(rows.dtype)
        summed = tl.dot(weight, rows, summed * faded[:, None], input_precision="ieee")
        if FORMAT == 0:
            summed_turned = tl.dot(
                weight, rotated_rows, summed_turned * faded[:, None], input_precision="ieee"
            )
        highest = higher
        slot = _slots(tile + 1, tiles, row, length, more_row, more_length, KEYS)

    target = (split * tl.num_programs(0) + token) * heads + head
    if lse is not None:
        known = (highest + tl.log2(tl.maximum(total, 1e-37))) * 0.6931471805599453
        tl.store(lse + target, known, mask=head < heads)
    divisor, faded = total, tl.full((HEADS,), 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=head < heads, other=float("-inf"))
        divisor, faded = _with_sink(highest, total, sink)
    share = (faded * 2.0**SHIFT / tl.where(divisor > 0, divisor, 1.0))[:, None]
    place = out + target[:, None] * WIDTH
    tl.store(place + channel, (summed * share).to(out.dtype.element_ty), mask=here & (channel < PLAIN))
    if FORMAT == 0:
        tl.store(place + PLAIN + rotary, (summed_turned * share).to(out.dtype.element_ty), mask=here)


@triton.jit
def _query(place, here):
    query = tl.load(place, mask=here, other=0.0)
    return query.to(tl.bfloat16) if query.dtype.primitive_bitwidth == 8 else query


@triton.jit
def _row(slots, lengths, table_rows, token, height, columns, stride):
    """Where a query's slots lie, and how many. Rows of padding may name requests that the step has not."""
    row, length = token, columns
    if table_rows is not None:
        row = tl.minimum(tl.maximum(tl.load(table_rows + token), 0), height - 1).to(tl.int64)
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + token), 0).to(tl.int32), columns)
    return slots + row * stride, length


@triton.jit
def _slots(tile, tiles, row, length, more_row, more_length, KEYS: tl.constexpr):
    """A tile's slots, -1 where it has none."""
    mine = tile < tiles
    column = tl.where(mine, tile, tile - tiles) * KEYS + tl.arange(0, KEYS)
    return tl.load(
        tl.where(mine, row, more_row) + column, mask=column < tl.where(mine, length, more_length), other=-1
    )


@triton.jit
def _loaded(
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
def _decoded(
    values,
    exponent,
    turned,
    mine,
    scale,
    more_scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    SHIFT: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Rows `[KEYS, WIDTH]` times 2^-SHIFT; of packed ones the rotary channels `[KEYS, 64]` by themselves."""
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
        rows, turned = tl.reshape(tiles, (KEYS, WIDTH)).to(DTYPE), turned.to(DTYPE)
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


@triton.jit
def _with_sink(highest, total, sink):
    """The sum of weights with that of the sink, and by how much the other weights fade."""
    sink = tl.minimum(tl.maximum(sink.to(tl.float32) * 1.4426950408889634, -3e38), 3e38)
    top = tl.maximum(highest, sink)
    faded = tl.exp2(highest - top)
    return total * faded + tl.exp2(sink - top), faded


@triton.jit
def _merge(
    parts,
    part_lse,
    sinks,
    out,
    lse,
    count,
    heads,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Each part is normalised by itself: its log-sum-exp is its weight. All parts are fetched at once."""
    token = tl.program_id(0).to(tl.int64)
    head, part = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, PARTS)
    here, channel = head < heads, tl.arange(0, WIDTH)
    target = token * heads + head
    row = part[:, None] * (tl.num_programs(0).to(tl.int64) * heads) + target[None, :]
    known = (part < count)[:, None] & here[None, :]
    own = tl.load(part_lse + row, mask=known, other=float("-inf"))
    values = tl.load(
        parts + row[:, :, None] * WIDTH + channel[None, None, :], mask=known[:, :, None], other=0.0
    )
    highest = tl.max(own, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp(own - base[None, :])
    total, summed = tl.sum(weight, axis=0), tl.sum(weight[:, :, None] * values, axis=0)
    if lse is not None:
        tl.store(lse + target, highest + tl.log(tl.maximum(total, 1e-37)), mask=here)
    divisor, faded = total, tl.full((HEADS,), 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=here, other=float("-inf"))
        divisor, faded = _with_sink(base * 1.4426950408889634, total, sink)
    result = summed * (faded / tl.where(divisor > 0, divisor, 1.0))[:, None]
    place = out + target[:, None] * WIDTH + channel[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=here[:, None])
