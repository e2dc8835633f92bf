"""Attention over rows of one or two pools: `attend.cu`, launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dsv4_plugin_hopper import compiled
from dsv4_plugin_hopper.compiled import FLOAT, INT, LONG, POINTER, UNSIGNED
from dsv4_plugin_hopper.plugin import E4M3_IN_F16
from dsv4core.api import ConfigError
from dsv4core.kvcache import KVCache

KEYS, HEADS, THREADS = 64, 64, 512
LOG2_E = 1.4426950408889634
MOST_SLICES = 16
"""Of an item's keys: blocks of a cluster."""
TILE, MERGE, HEAD = 3700, 2500, 115
"""Cycles of a tile of packed rows, a merge of slices, and each head in it (NOTES.md, version 12)."""
KERNELS = {"fp8_ds_mla": "packed", "fp8_e4m3": "codes", "bf16": "wide"}
"""Of rows."""


@dataclass(frozen=True, eq=False)
class Pool:
    """A pool, and what queries attend of it.

    Attributes:
        cache: Its rows, of one of `KERNELS`.
        slots: `[queries, columns]` int32, columns side by side; -1 for none.
        lengths: `[queries]` int32: columns that count; None for all.
        owners: `[queries]` int32: each query's row of `slots`, where queries share rows; None for its own. A
            query without a row has a length of 0.
    """

    cache: KVCache
    slots: torch.Tensor
    lengths: torch.Tensor | None = None
    owners: torch.Tensor | None = None


def attend(
    q: torch.Tensor,
    pools: Sequence[Pool],
    scale: float,
    sinks: torch.Tensor | None,
    want_lse: bool = False,
    f16: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend.

    Args:
        q: `[queries, heads, 512]` bf16, heads of a query side by side.
        pools: One or two, of rows of one format.
        scale: Of the scores.
        sinks: `[heads]` fp32, or None.
        want_lse: Whether log-sum-exps are wanted.
        f16: Whether codes and what they meet are turned into f16 and not bf16, for |q| and |k| below 65,504.
            Rows of bf16 are not turned.

    Returns:
        `[queries, heads, 512]` bf16, and `[queries, heads]` fp32 or None.

    Raises:
        ConfigError: Pools are not one or two, of one format; slots are of another type or apart, pages
            apart by what cannot be loaded; f16 is asked for E4M3 rows.
    """
    check(pools, f16)
    queries, heads, width = q.shape
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device) if want_lse else None
    if q.stride()[1:] != (width, 1) or q.stride(0) % 8 or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    if q.numel() == 0:
        return out, lse
    window, *further = pools
    tiles = sum(-(-pool.slots.shape[1] // KEYS) for pool in pools)
    rows = *_of_pool(window), *(_of_pool(further[0]) if further else _nothing(window))
    name = kernel_name(window.cache.format.name, f16)
    own = division(name, q.device.index, queries, heads, tiles)
    arguments = (
        (q.data_ptr(), POINTER),
        (q.stride(0), LONG),
        *rows,
        (_address(sinks), POINTER),
        (out.data_ptr(), POINTER),
        (_address(lse), POINTER),
        (heads, INT),
        (own.heads, INT),
        (own.items, INT),
        (scale * LOG2_E, FLOAT),
    )
    compiled.launch(name, q.device.index, (own.slices, own.blocks, 1), THREADS, arguments)
    return out, lse


def check(pools: Sequence[Pool], f16: bool) -> None:
    """Refuse what the kernel would read as something else."""
    names = [pool.cache.format.name for pool in pools]
    if len(pools) not in (1, 2) or len(set(names)) != 1 or names[0] not in KERNELS:
        raise ConfigError(
            f"Pools are of {', '.join(names) or 'no rows'}; give one or two, of one of {', '.join(KERNELS)}."
        )
    if f16 and names[0] == "fp8_e4m3":
        raise ConfigError(f"{E4M3_IN_F16}; set backend.operands=bf16.")
    for pool in pools:
        if pool.slots.dtype is not torch.int32 or pool.slots.stride(1) != 1:
            dtype = str(pool.slots.dtype).removeprefix("torch.")
            raise ConfigError(
                f"Slots are {dtype}, {pool.slots.stride(1)} apart in a row; give int32, side by side."
            )


def kernel_name(format: str, f16: bool) -> str:
    """The entry of `attend.cu` for rows of a format."""
    return f"{KERNELS[format]}_{'f16' if f16 and format == 'fp8_ds_mla' else 'bf16'}"


@dataclass(frozen=True)
class Division:
    """What a launch's blocks have.

    Attributes:
        heads: Of a query, an item's at most.
        items: Of all queries.
        slices: Of an item's keys, one for each block of a cluster.
        blocks: Or clusters, which go on to further items.
    """

    heads: int
    items: int
    slices: int
    blocks: int


@lru_cache(maxsize=4096)
def division(kernel: str, device: int, queries: int, heads: int, tiles: int) -> Division:
    """The fastest of those whose clusters run at once, as far as cycles are known; else no slices.

    Slices have fewer tiles, and are merged, which takes as long as an item has heads.
    """
    best, least = None, 0.0
    for item_heads in (HEADS, *(fewer for fewer in (32, 16, 8) if fewer < heads)):
        items = queries * -(-heads // item_heads)
        for slices in range(1, max(min(tiles, MOST_SLICES), 1) + 1):
            if items > compiled.clusters(kernel, device, slices, THREADS):
                continue
            # A block's own slice is not sent.
            merged = (MERGE + HEAD * min(item_heads, heads) * (1 - 1 / slices)) if slices > 1 else 0.0
            cycles = TILE * -(-tiles // slices) + merged
            if best is None or cycles < least:
                best, least = Division(item_heads, items, slices, items), cycles
    if best is not None:
        return best
    items = queries * -(-heads // HEADS)
    return Division(HEADS, items, 1, compiled.clusters(kernel, device, 1, THREADS))


def _of_pool(pool: Pool) -> tuple[tuple[Any, Any], ...]:
    cache, slots = pool.cache, pool.slots
    if cache.page_stride_bytes % 16 or cache.pool.data_ptr() % 16:
        raise ConfigError(
            f"Pages are {cache.page_stride_bytes:,} bytes apart, and rows are loaded 16 bytes at a time; "
            "give pools and strides of whole 16 bytes, or use backend=triton."
        )
    return (
        (cache.pool.data_ptr(), POINTER),
        (cache.page_stride_bytes, LONG),
        (cache.page_size, UNSIGNED),
        *((number, UNSIGNED) for number in quotient(cache.page_size)),
        (_address(cache.scale), POINTER),
        (slots.data_ptr(), POINTER),
        (slots.stride(0), LONG),
        (_address(pool.owners), POINTER),
        (_address(pool.lengths), POINTER),
        (slots.shape[1], INT),
    )


def _nothing(like: Pool) -> tuple[tuple[Any, Any], ...]:
    """A pool of which no column is looked at."""
    *pool_and_slots, _, _, _ = _of_pool(like)
    return (*pool_and_slots, (0, POINTER), (0, POINTER), (0, INT))


def quotient(divisor: int) -> tuple[int, int]:
    """A factor and a shift: n // divisor is n * factor >> shift, n below 2^31 (Granlund, Montgomery 1994)."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


def _address(tensor: torch.Tensor | None) -> int:
    """0 for none: `cuda.bindings` takes no None for a pointer."""
    return 0 if tensor is None else tensor.data_ptr()
