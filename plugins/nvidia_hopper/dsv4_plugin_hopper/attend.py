"""Attention over rows of one or two pools: `attend.cu`, launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_plugin_hopper import compiled
from dsv4_plugin_hopper.compiled import FLOAT, INT, LONG, POINTER, UNSIGNED
from dsv4core.api import ConfigError
from dsv4core.kvcache import KVCache

KEYS, HEADS, THREADS = 64, 64, 512
LOG2_E = 1.4426950408889634
MOST_QUERIES = (1 << 16) - 1
"""Of a launch: blocks of a grid's third dimension."""
SLICES = (8, 5, 4, 3, 2)
"""Of a query's keys: those that were timed."""
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

    def of(self, queries: slice) -> Pool:
        """What some of the queries attend."""
        slots = self.slots[queries] if self.owners is None else self.slots
        lengths, owners = (None if own is None else own[queries] for own in (self.lengths, self.owners))
        return Pool(self.cache, slots, lengths, owners)


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
        f16: Whether codes and what they meet are turned into f16 and not bf16: faster, for |q| and |k| below
            65,504. Rows of bf16 are not turned.

    Returns:
        `[queries, heads, 512]` bf16, and `[queries, heads]` fp32 or None.

    Raises:
        ConfigError: Pages are apart by what cannot be loaded.
    """
    queries, heads, width = q.shape
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device) if want_lse else None
    if q.stride()[1:] != (width, 1) or q.stride(0) % 8 or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    for first in range(0, queries, MOST_QUERIES):
        turn = slice(first, first + MOST_QUERIES)
        own = None if lse is None else lse[turn]
        _launch(q[turn], [pool.of(turn) for pool in pools], scale, sinks, out[turn], own, f16)
    return out, lse


def _launch(
    q: torch.Tensor,
    pools: Sequence[Pool],
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    f16: bool,
) -> None:
    queries, heads, _ = q.shape
    window, *further = pools
    tiles = sum(-(-pool.slots.shape[1] // KEYS) for pool in pools)
    blocks = -(-heads // HEADS)
    arguments = (
        *((q.data_ptr(), POINTER), (q.stride(0), LONG)),
        *_of_pool(window),
        *(_of_pool(further[0]) if further else _nothing(window)),
        *((_address(sinks), POINTER), (out.data_ptr(), POINTER), (_address(lse), POINTER)),
        *((heads, INT), (scale * LOG2_E, FLOAT)),
    )
    name = kernel_name(window.cache.format.name, f16)
    grid = slices(name, q.device.index, queries * blocks, tiles), blocks, queries
    compiled.launch(name, q.device.index, grid, THREADS, arguments)


def kernel_name(format: str, f16: bool) -> str:
    """The entry of `attend.cu` for rows of a format."""
    return f"{KERNELS[format]}_{'f16' if f16 and format != 'bf16' else 'bf16'}"


def slices(kernel: str, device: int, items: int, tiles: int) -> int:
    """How many slices the keys of each item have: of two tiles or more, if all clusters run at once."""
    able = (size for size in SLICES if size <= tiles // 2)
    return next((size for size in able if items <= compiled.clusters(kernel, device, size, THREADS)), 1)


def _of_pool(pool: Pool) -> tuple[tuple[Any, Any], ...]:
    cache, slots = pool.cache, pool.slots
    if cache.page_stride_bytes % 16 or cache.pool.data_ptr() % 16:
        raise ConfigError(
            f"Pages are {cache.page_stride_bytes:,} bytes apart, and rows are loaded 16 bytes at a time; "
            "give pools and strides of whole 16 bytes, or use backend=triton."
        )
    return (
        *((cache.pool.data_ptr(), POINTER), (cache.page_stride_bytes, LONG), (cache.page_size, UNSIGNED)),
        *((_address(cache.scale), POINTER), (slots.data_ptr(), POINTER), (slots.stride(0), LONG)),
        *((_address(pool.owners), POINTER), (_address(pool.lengths), POINTER), (slots.shape[1], INT)),
    )


def _nothing(like: Pool) -> tuple[tuple[Any, Any], ...]:
    """A pool of which no column is looked at."""
    return (*_of_pool(like)[:6], (0, POINTER), (0, POINTER), (0, INT))


def _address(tensor: torch.Tensor | None) -> int:
    """0 for none: `cuda.bindings` takes no None for a pointer."""
    return 0 if tensor is None else tensor.data_ptr()
