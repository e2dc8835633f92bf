"""Attention over rows of one or two pools: `attend.cu`, launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    items = queries * -(-heads // HEADS)
    arguments = (
        (q.data_ptr(), POINTER),
        (q.stride(0), LONG),
        *_of_pool(window),
        *(_of_pool(further[0]) if further else _nothing(window)),
        (_address(sinks), POINTER),
        (out.data_ptr(), POINTER),
        (_address(lse), POINTER),
        (heads, INT),
        (items, INT),
        (scale * LOG2_E, FLOAT),
    )
    name = kernel_name(window.cache.format.name, f16)
    compiled.launch(name, q.device.index, grid(name, q.device.index, items, tiles), THREADS, arguments)
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


def grid(kernel: str, device: int, items: int, tiles: int) -> tuple[int, int, int]:
    """Slices of each item's keys, as few as have the fewest tiles each, if all run at once; and blocks."""
    at_once = {
        size: compiled.clusters(kernel, device, size, THREADS)
        for size in range(1, max(min(tiles, MOST_SLICES), 1) + 1)
    }
    able = [size for size, clusters in at_once.items() if items <= clusters]
    slices = min(able, key=lambda size: (-(-tiles // size), size), default=1)
    return slices, min(items, at_once[slices]), 1


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
