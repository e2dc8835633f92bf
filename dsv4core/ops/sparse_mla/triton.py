"""Sparse attention in place: rows are read from the paged pools as they are attended, for decode and prefill.

A program attends for some heads of one token, over a part of its tiles of rows. Parts are merged by a second
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4core.api.errors import ConfigError
from dsv4core.fp8_triton import converts_packed, multiplies_fp8
from dsv4core.kvcache.codecs_triton import cache_arguments
from dsv4core.kvcache.tiles_triton import decoded, fetched, tile_slots
from dsv4core.ops.sparse_mla.merge_triton import merge_parts, with_sink
from dsv4core.ops.sparse_mla.reference import Pool, Rows
from dsv4core.ops.sparse_mla.schedule_triton import Format, Schedule, schedule

SHIFT = 60
"""Packed rows are decoded times 2^-60 where two codes are converted at once: bf16 holds any of them."""
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
    return scheduled_sparse_mla(q, pools, softmax_scale, sinks, want_lse, attention_schedule(q, pools))


def scheduled_sparse_mla(
    q: torch.Tensor,
    pools: Sequence[Rows | Pool],
    softmax_scale: float,
    sinks: torch.Tensor | None,
    want_lse: bool,
    division: Schedule,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`sparse_mla`, by a schedule that other calls of the step have, too.

    Raises:
        ConfigError: There are more than two pools, or the schedule is of others.
    """
    out, lse = results(q, want_lse)
    attend(q, pools, softmax_scale, sinks, out, lse, division)
    return out, lse


def results(q: torch.Tensor, want_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where attention for queries `[tokens, heads, head_dim]` is written, and its log-sum-exp."""
    out = torch.empty(q.shape, dtype=_attended(q), device=q.device)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if want_lse else None


def _attended(q: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if q.itemsize == 1 else q.dtype


def attention_schedule(q: torch.Tensor, pools: Sequence[Rows | Pool]) -> Schedule:
    """The division of attention with tables and lengths like these, whatever the slots and queries are.

    Raises:
        ConfigError: There are more than two pools.
    """
    rows = _two_at_most(pools)
    tables = [(own.slots.shape[1], own.lengths) for own in rows]
    return schedule(q.shape[0], q.shape[1], tables, _formats_of(rows), _attended(q), q.device)


def _formats_of(rows: Sequence[Rows]) -> set[Format]:
    return {(own.cache.format.name, own.cache.format.fp8) for own in rows}


def _two_at_most(pools: Sequence[Rows | Pool]) -> list[Rows]:
    if not 1 <= len(pools) <= 2:
        raise ConfigError(f"{len(pools)} pools were given, and this kernel attends one or two.")
    return [Rows(*own) for own in pools]


def attend(
    q: torch.Tensor,
    pools: Sequence[Rows | Pool],
    softmax_scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    division: Schedule,
) -> None:
    """Attend into `out` and `lse`, which are as those of `results`.

    Raises:
        ConfigError: There are more than two pools, or the schedule is of others.
    """
    rows = _two_at_most(pools)
    own = (len(q), tuple(each.slots.shape[1] for each in rows), _formats_of(rows))
    made = (division.tokens, division.tables, division.formats)
    if own != made:
        raise ConfigError(
            f"The schedule is of {_said(*made)}; these are {_said(*own)}. Make one with attention_schedule."
        )
    if not len(q):
        return
    tokens, heads, width = q.shape
    blocks, items, splits = division.blocks, division.items, division.splits
    programs, kept = (tokens, splits * tokens) if items is None else (len(items.tokens), items.most_parts)
    divided = splits > 1 or items is not None
    parts = part_lse = None
    if divided:
        parts = torch.empty(kept, heads, width, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(kept, heads, dtype=torch.float32, device=q.device)
    formats = _formats(rows[0], rows[-1], q.device, out.dtype)
    places = (None, None, None) if items is None else (items.tokens, items.firsts, items.parts)
    _attend[(programs, triton.cdiv(heads, blocks.heads), splits)](
        *(q, out, lse, sinks, parts, part_lse, *places, tokens),
        *(heads, q.stride(0), q.stride(1), softmax_scale),
        *_arguments(rows[0]),
        *(_arguments(rows[1]) if len(rows) > 1 else NOTHING),
        **formats,
        HEADS=blocks.heads,
        KEYS=blocks.keys,
        WIDTH=width,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    if divided:
        assert parts is not None
        assert part_lse is not None
        merge_parts(parts, part_lse, items, splits, sinks, out, lse)


def _said(tokens: int, tables: tuple[int, ...], formats: Set[Format]) -> str:
    named = " and ".join(sorted(name if fp8 is None else f"{name} ({fp8})" for name, fp8 in formats))
    return f"{tokens} tokens, tables of {tables} columns and {named} rows"


def _arguments(rows: Rows) -> tuple[Any, ...]:
    cache = cache_arguments(rows.cache)
    places = (rows.slots, rows.lengths, rows.table_rows, *rows.slots.shape, rows.slots.stride(0))
    return (*places, *(cache[name] for name in ("pool", "page_stride", "scale")))


def _formats(rows: Rows, more: Rows, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """How the kernel decodes rows."""
    cache, other = cache_arguments(rows.cache), cache_arguments(more.cache)
    alike = all(cache[name] == other[name] for name in ("FORMAT", "FNUZ"))
    form = rows.cache.format
    paired = alike and (form.name, form.fp8, dtype) == ("fp8_ds_mla", "e4m3fn", torch.bfloat16)
    whole = multiplies_fp8(device, torch.float8_e4m3fn)  # such a chip converts codes, too
    return {
        "FORMAT": cache["FORMAT"],
        "MORE_FORMAT": other["FORMAT"],
        "FNUZ": cache["FNUZ"],
        "MORE_FNUZ": other["FNUZ"],
        "SHIFT": SHIFT if paired and converts_packed(device) and not whole else 0,
        "APART": alike and form.name == "fp8_ds_mla",
        "PAGE_SIZE": rows.cache.page_size,
        "MORE_PAGE_SIZE": more.cache.page_size,
    }


@triton.jit(do_not_specialize=["tokens"])
def _attend(
    q,
    out,
    lse,
    sinks,
    parts,
    part_lse,
    item_tokens,
    firsts,
    places,
    tokens,
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
    MORE_FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    MORE_FNUZ: tl.constexpr,
    SHIFT: tl.constexpr,
    APART: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MORE_PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    token, part, count = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    kept = token * count + part
    if item_tokens is not None:
        token = tl.load(item_tokens + tl.program_id(0)).to(tl.int64)
        head = tl.where(token < tokens, head, heads)  # an item of nothing loads and stores nothing
        token = tl.minimum(token, tokens - 1)
        part = tl.program_id(0) - tl.load(firsts + token)
        count = tl.load(firsts + token + 1) - tl.load(firsts + token)
        kept = tl.load(places + token).to(tl.int64) + part
        part = tl.minimum(part, count)  # and has the part behind the last one
    here, channel, rotary = (head < heads)[:, None], tl.arange(0, WIDTH)[None, :], tl.arange(0, 64)[None, :]
    # The 64 rotary channels of packed rows have a product of their own, and none in the other one.
    PLAIN: tl.constexpr = WIDTH - 64 if APART else WIDTH
    query_place = q + token * q_token + head[:, None] * q_head
    query = _query(query_place + channel, here & (channel < PLAIN))
    query_turned = _query(query_place + PLAIN + rotary, here) if APART else query
    factor = softmax_scale * (1.4426950408889634 * 2.0**SHIFT)  # scores to the base of 2
    highest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    summed = tl.zeros((HEADS, WIDTH), tl.float32)
    turned = tl.zeros((HEADS, 64), tl.float32)

    # Tiles of both pools are one list, so that the next one is on its way whatever its pool is.
    row, length = _row(slots, lengths, table_rows, token, height, columns, slot_stride)
    tiles = tl.cdiv(length, KEYS)
    all_tiles = tiles
    if more_slots is not None:
        more_row, more_length = _row(
            more_slots, more_lengths, more_table_rows, token, more_height, more_columns, more_slot_stride
        )
        all_tiles += tl.cdiv(more_length, KEYS)
    first, last = all_tiles * part // count, tl.minimum(all_tiles * (part + 1) // count, all_tiles)
    if more_slots is None:
        highest, total, summed, turned = _attend_tiles(
            *(query, query_turned, factor, highest, total, summed, turned, first, last, tiles),
            *(row, length, pool, page_stride, scale, row, length, pool, page_stride, scale),
            *(FORMAT, FNUZ, SHIFT, APART, PAGE_SIZE, PAGE_SIZE, KEYS, WIDTH),
        )
    elif FORMAT == MORE_FORMAT and FNUZ == MORE_FNUZ:
        highest, total, summed, turned = _attend_tiles(
            *(query, query_turned, factor, highest, total, summed, turned, first, last, tiles),
            *(row, length, pool, page_stride, scale),
            *(more_row, more_length, more_pool, more_page_stride, more_scale),
            *(FORMAT, FNUZ, SHIFT, APART, PAGE_SIZE, MORE_PAGE_SIZE, KEYS, WIDTH),
        )
    else:
        highest, total, summed, turned = _attend_tiles(
            *(query, query_turned, factor, highest, total, summed, turned),
            *(first, tl.minimum(last, tiles), tiles),
            *(row, length, pool, page_stride, scale, row, length, pool, page_stride, scale),
            *(FORMAT, FNUZ, SHIFT, APART, PAGE_SIZE, PAGE_SIZE, KEYS, WIDTH),
        )
        highest, total, summed, turned = _attend_tiles(
            *(query, query_turned, factor, highest, total, summed, turned),
            *(tl.maximum(first - tiles, 0), last - tiles, last - tiles),
            *(more_row, more_length, more_pool, more_page_stride, more_scale),
            *(more_row, more_length, more_pool, more_page_stride, more_scale),
            *(MORE_FORMAT, MORE_FNUZ, SHIFT, APART, MORE_PAGE_SIZE, MORE_PAGE_SIZE, KEYS, WIDTH),
        )

    known = (highest + tl.log2(tl.maximum(total, 1e-37))) * 0.6931471805599453
    if parts is None:
        _store_whole(
            *(out, lse, sinks, token * heads + head, head, heads, known, highest, total, summed, turned),
            *(SHIFT, APART, WIDTH),
        )
    elif item_tokens is None:
        _store_part(
            *(parts, part_lse, kept * heads + head, head < heads, known, total, summed, turned),
            *(SHIFT, APART, WIDTH),
        )
    elif count == 1:
        _store_whole(
            *(out, lse, sinks, token * heads + head, head, heads, known, highest, total, summed, turned),
            *(SHIFT, APART, WIDTH),
        )
    else:
        _store_part(
            *(parts, part_lse, kept * heads + head, head < heads, known, total, summed, turned),
            *(SHIFT, APART, WIDTH),
        )


@triton.jit
def _store_whole(
    out,
    lse,
    sinks,
    row,
    head,
    heads,
    known,
    highest,
    total,
    summed,
    turned,
    SHIFT: tl.constexpr,
    APART: tl.constexpr,
    WIDTH: tl.constexpr,
):
    if lse is not None:
        tl.store(lse + row, known, mask=head < heads)
    divisor, faded = total, tl.full(total.shape, 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=head < heads, other=float("-inf"))
        divisor, faded = with_sink(highest, total, sink)
    share = faded * 2.0**SHIFT / tl.where(divisor > 0, divisor, 1.0)
    _store_heads(out, row, summed, turned, share, head < heads, APART, WIDTH)


@triton.jit
def _store_part(
    parts,
    part_lse,
    row,
    here,
    known,
    total,
    summed,
    turned,
    SHIFT: tl.constexpr,
    APART: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Each part is normalised by itself: its log-sum-exp is its weight. The sink is added to their sum."""
    tl.store(part_lse + row, known, mask=here)
    share = 2.0**SHIFT / tl.where(total > 0, total, 1.0)
    _store_heads(parts, row, summed, turned, share, here, APART, WIDTH)


@triton.jit
def _store_heads(to, row, summed, turned, share, here, APART: tl.constexpr, WIDTH: tl.constexpr):
    channel, rotary = tl.arange(0, WIDTH)[None, :], tl.arange(0, 64)[None, :]
    plain: tl.constexpr = WIDTH - 64 if APART else WIDTH
    place, here = to + row[:, None] * WIDTH, here[:, None]
    tl.store(
        place + channel, (summed * share[:, None]).to(to.dtype.element_ty), mask=here & (channel < plain)
    )
    if APART:
        tl.store(place + plain + rotary, (turned * share[:, None]).to(to.dtype.element_ty), mask=here)


@triton.jit
def _query(place, here):
    query = tl.load(place, mask=here, other=0.0)
    return query.to(tl.bfloat16) if query.dtype.primitive_bitwidth == 8 else query


@triton.jit
def _attend_tiles(
    query,
    query_turned,
    factor,
    highest,
    total,
    summed,
    turned,
    first,
    last,
    tiles,
    row,
    length,
    pool,
    page_stride,
    scale,
    more_row,
    more_length,
    more_pool,
    more_page_stride,
    more_scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    SHIFT: tl.constexpr,
    APART: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MORE_PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Tiles `first` to `last` of two pools of one format; the first pool has `tiles` of them."""
    slot = tile_slots(first, tiles, row, length, more_row, more_length, KEYS)
    for tile in range(first, last):
        codes, exponent, rotated = fetched(
            *(slot, tile < tiles, pool, page_stride, more_pool, more_page_stride),
            *(FORMAT, PAGE_SIZE, MORE_PAGE_SIZE, KEYS, WIDTH),
        )
        rows, rotated = decoded(
            *(codes, exponent, rotated, tile < tiles, None, None),
            *(FORMAT, FNUZ, SHIFT, APART, KEYS, WIDTH, query.dtype),
        )
        score = tl.dot(query, tl.trans(rows), input_precision="ieee")
        if APART:
            score = tl.dot(query_turned, tl.trans(rotated), score, input_precision="ieee")
        # The scale of a cache times a code is no bf16 value: it multiplies scores and weights instead.
        own = _scale_of(tile < tiles, scale, more_scale)
        score = tl.where((slot >= 0)[None, :], score * (factor * own), float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        faded = tl.exp2(highest - base)
        total = total * faded + tl.sum(weight, axis=1)
        weight = (weight * own).to(rows.dtype)
        summed = tl.dot(weight, rows, summed * faded[:, None], input_precision="ieee")
        if APART:
            turned = tl.dot(weight, rotated, turned * faded[:, None], input_precision="ieee")
        highest = higher
        slot = tile_slots(tile + 1, tiles, row, length, more_row, more_length, KEYS)
    return highest, total, summed, turned


@triton.jit
def _scale_of(mine, scale, more_scale):
    """The scale of a tile's cache: 1 where caches have none."""
    if (scale is None) and (more_scale is None):
        own = 1.0
    else:
        own = tl.where(
            mine,
            1.0 if scale is None else tl.load(scale),
            1.0 if more_scale is None else tl.load(more_scale),
        )
    return own


@triton.jit
def _row(slots, lengths, table_rows, token, height, columns, stride):
    """Where a query's slots lie, and how many. Rows of padding may name requests that the step has not."""
    row, length = token, columns
    if table_rows is not None:
        row = tl.minimum(tl.maximum(tl.load(table_rows + token), 0), height - 1).to(tl.int64)
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + token), 0), columns).to(tl.int32)
    return slots + row * stride, length
