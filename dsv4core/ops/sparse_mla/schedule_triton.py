"""How sparse attention is divided among a GPU's processors.

Where tables are short, rows are about alike, and each has as many parts as there is room for. Where they
are long, lengths that only the device knows decide: a long row has many parts, and a short one is whole. So a
captured graph fills the machine whatever the lengths of the step are.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from dsv4core.api.kvcache import round_up

SHORT = 24
"""Tiles of a short table."""
MOST_SPLITS = 16
WAVES = 4
"""Programs for each that the machine has room for, behind which long rows are whole, too."""
TOKENS = 64
ITEMS = 128
"""What the scheduling program looks at at a time."""


@dataclass(frozen=True)
class Blocks:
    """What a program does.

    Attributes:
        heads: Heads of one program: its sums are `heads` x 512 in registers.
        keys: Rows that are attended at a time: a tile.
        warps: Warps of a program.
        stages: Tiles of rows that are on their way.
        shared: Bytes of shared memory that it takes, at most.
    """

    heads: int
    keys: int
    warps: int
    stages: int
    shared: int = 192 << 10


WIDE = Blocks(heads=64, keys=64, warps=8, stages=2)
MIDDLE = Blocks(heads=64, keys=32, warps=8, stages=2, shared=130 << 10)
"""On AMD's chips, which keep queries in registers, it takes 64 KB."""
NARROW = Blocks(heads=16, keys=32, warps=4, stages=2, shared=83 << 10)
TALL = Blocks(heads=16, keys=64, warps=4, stages=2, shared=144 << 10)
"""For bf16 rows, which need no conversion: programs of few heads are more of them."""

Table = tuple[int, torch.Tensor | None]
"""Columns of a pool's slots, and `[tokens]` how many of them count: None for all."""


Format = tuple[str, str | None]
"""Name and FP8 flavour of a pool's format."""


@dataclass(frozen=True, eq=False)
class Items:
    """Work that is divided on the device, an item a program.

    Attributes:
        tokens: `[items]` int32: the token of each; as many as there are tokens for an item of nothing.
        firsts: `[tokens + 1]` int32: the first item of each token.
        parts: `[tokens]` int32: where a token's first part is kept, if it has several.
        most_parts: Parts of all divided tokens, at most.
    """

    tokens: torch.Tensor
    firsts: torch.Tensor
    parts: torch.Tensor
    most_parts: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """The division of one call, or of all calls of a step whose lengths are the same.

    Attributes:
        blocks: What a program does.
        tokens: Query tokens.
        tables: Columns of each pool's slots.
        formats: Of the pools.
        splits: Parts of every row.
        items: The parts of each row, where they are not as many.
    """

    blocks: Blocks
    tokens: int
    tables: tuple[int, ...]
    formats: Set[Format]
    splits: int
    items: Items | None


def schedule(
    tokens: int,
    heads: int,
    tables: Sequence[Table],
    formats: Set[Format],
    dtype: torch.dtype,
    device: torch.device,
) -> Schedule:
    """Divide the rows of one pool or two.

    Args:
        tokens: Query tokens.
        heads: Query heads.
        tables: The pools' slots.
        formats: Of the pools.
        dtype: Of the queries, as they are attended.
        device: Where.
    """
    blocks = _blocks(tokens, heads, formats, device, dtype)
    resident = max(1, min(2, _shared_memory(device) // blocks.shared))
    room = max(1, resident * processors(device) // triton.cdiv(heads, blocks.heads))
    longest = sum(triton.cdiv(columns, blocks.keys) for columns, _ in tables)
    widths = tuple(columns for columns, _ in tables)
    if longest <= SHORT or tokens > WAVES * room:
        return Schedule(blocks, tokens, widths, formats, _splits(longest, room // max(tokens, 1)), None)
    items = _items(tokens, tables, room, blocks.keys, device)
    return Schedule(blocks, tokens, widths, formats, 1, items)


def _splits(tiles: int, most: int) -> int:
    """Parts of a row: as few as are as short as those of `most` parts."""
    length = triton.cdiv(tiles, max(1, min(most, MOST_SPLITS)))
    return max(1, triton.cdiv(tiles, max(1, length)))


def _items(tokens: int, tables: Sequence[Table], room: int, keys: int, device: torch.device) -> Items:
    most = tokens + room
    sizes = (most, tokens + 1, tokens)
    padded = [round_up(size, 4) for size in sizes]  # kernels are compiled for how pointers are aligned
    pieces = torch.empty(sum(padded), dtype=torch.int32, device=device).split(padded)
    item_tokens, firsts, parts = (piece[:size] for piece, size in zip(pieces, sizes, strict=True))
    (columns, lengths), (more_columns, more_lengths) = (*tables, (0, None))[:2]
    _schedule[(1,)](
        *(lengths, more_lengths, columns, more_columns, tokens, room, item_tokens, firsts, parts),
        KEYS=keys,
        TOKENS=TOKENS,
        ITEMS=ITEMS,
        num_warps=8,
    )
    return Items(item_tokens, firsts, parts, 2 * room)


def _blocks(
    tokens: int, heads: int, formats: Set[Format], device: torch.device, dtype: torch.dtype
) -> Blocks:
    if len(formats) > 1:  # two loops, whose tiles lie in shared memory side by side
        alike = _blocks(tokens, heads, {("", None)}, device, dtype)
        return replace(alike, keys=max(16, alike.keys // 2), stages=1)
    plain = formats == {("bf16", None)}
    if dtype == torch.float32:
        return replace(NARROW, keys=NARROW.keys // 2)
    shared, narrow = _shared_memory(device), tokens * triton.cdiv(heads, NARROW.heads)
    if plain and shared >= 224 << 10 and (heads <= NARROW.heads or 4 * narrow <= processors(device)):
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
def processors(device: torch.device) -> int:
    """Processors of a GPU; a few where Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit(do_not_specialize=["tokens", "room"])
def _schedule(
    lengths,
    more_lengths,
    columns,
    more_columns,
    tokens,
    room,
    item_tokens,
    firsts,
    parts,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Parts are as short as they may be if all are to run at once, or as their share where they cannot."""
    total, longest = 0, 0
    for first in range(0, tokens, TOKENS):
        tiles = _tiles(lengths, more_lengths, first, tokens, columns, more_columns, KEYS, TOKENS)
        total += tl.sum(tiles, axis=0)
        longest = tl.maximum(longest, tl.max(tiles, axis=0))
    share = tl.maximum(tl.cdiv(total, room), 2)  # parts of one tile take longer to merge
    # To 235 shares, each 9 % longer than the one before; the last resort is to divide nothing.
    spans = tl.ceil(share * tl.exp2(tl.arange(0, 64).to(tl.float32) / 8)).to(tl.int32)
    counts = tl.zeros((64,), tl.int32)
    for first in range(0, tokens, TOKENS):
        tiles = _tiles(lengths, more_lengths, first, tokens, columns, more_columns, KEYS, TOKENS)
        counts += tl.sum(tl.cdiv(tiles[None, :], spans[:, None]), axis=1)
    shortest = tl.min(tl.where(counts <= room, spans, 2147483647), axis=0)
    span = tl.where(tokens > room, share, tl.minimum(shortest, tl.maximum(longest, 1)))

    items, kept = 0, 0
    for first in range(0, tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        tiles = _tiles(lengths, more_lengths, first, tokens, columns, more_columns, KEYS, TOKENS)
        count = tl.cdiv(tiles, span)
        own = tl.where(count > 1, count, 0)
        tl.store(firsts + token, items + tl.cumsum(count, axis=0) - count, mask=token < tokens)
        tl.store(parts + token, kept + tl.cumsum(own, axis=0) - own, mask=token < tokens)
        items += tl.sum(count, axis=0)
        kept += tl.sum(own, axis=0)
    tl.store(firsts + tokens, items)
    tl.debug_barrier()  # what was stored is read by other threads

    for begin in range(0, tokens + room, ITEMS):
        item = begin + tl.arange(0, ITEMS)
        before = tl.zeros((ITEMS,), tl.int32)
        for first in range(0, tokens, TOKENS):
            token = first + tl.arange(0, TOKENS)
            stop = tl.load(firsts + token + 1, mask=token < tokens, other=2147483647)
            before += tl.sum((stop[None, :] <= item[:, None]).to(tl.int32), axis=1)
        tl.store(item_tokens + item, before, mask=item < tokens + room)


@triton.jit
def _tiles(
    lengths, more_lengths, first, tokens, columns, more_columns, KEYS: tl.constexpr, TOKENS: tl.constexpr
):
    """Tiles of some tokens. One without rows has a tile, too: somebody has to write its zeros."""
    token = first + tl.arange(0, TOKENS)
    tiles = tl.cdiv(_length(lengths, token, tokens, columns), KEYS)
    tiles += tl.cdiv(_length(more_lengths, token, tokens, more_columns), KEYS)
    return tl.where(token < tokens, tl.maximum(tiles, 1), 0)


@triton.jit
def _length(lengths, token, tokens, columns):
    length = tl.zeros_like(token) + columns
    if lengths is not None:
        own = tl.load(lengths + token, mask=token < tokens, other=0)
        length = tl.minimum(tl.maximum(own, 0), columns).to(tl.int32)
    return length
