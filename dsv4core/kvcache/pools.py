"""All caches of a model on one rank, for hosts that have none of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from dsv4core.api.kvcache import KVCacheFormat, KVCacheLayout, PageSizes
from dsv4core.api.layer import LayerCaches, LayerSpec
from dsv4core.api.model import LayerKind, ModelShape
from dsv4core.api.selection import Limits
from dsv4core.kvcache.cache import KVCache, allocate_cache
from dsv4core.kvcache.pages import PagedTable, PageGroup

Allocate = Callable[[KVCacheFormat, int, int, torch.device | str], KVCache]
"""Makes a pool of a format: `(format, pages, rows a page, device)`."""


@dataclass(frozen=True)
class CacheTables:
    """The paged tables of a model's caches: one for windows, one for all contexts, one a kind for states."""

    window: PagedTable
    context: PagedTable
    state: Mapping[str, PagedTable]

    def all(self) -> tuple[PagedTable, ...]:
        """Every table."""
        return (self.window, self.context, *self.state.values())

    def num_pages(self) -> dict[str, int]:
        """Pages of the pools by group: `window`, `context`, and each kind's name for its states."""
        groups = {"window": self.window, "context": self.context, **self.state}
        return {name: table.num_pages for name, table in groups.items()}

    def grow(self, request: int, length: int) -> None:
        """Give `request` the pages for `length` tokens in every table, or in none of them.

        Raises:
            CacheError: A table or a pool has no room.
        """
        for table in self.all():
            missing = table.missing_pages(request, length)
            if missing > table.free_pages:
                table.grow(request, length)  # raises, before any table has changed
        for table in self.all():
            table.grow(request, length)

    def release(self, request: int) -> None:
        """Take back the pages of `request`."""
        for table in self.all():
            table.release(request)


def page_groups(
    model: ModelShape, kinds: Iterable[LayerKind], sizes: PageSizes, limits: Limits, decode_query_len: int
) -> tuple[PageGroup, PageGroup, dict[str, PageGroup]]:
    """The page groups of window, context and states.

    A window keeps what a whole step's queries look back on. A state keeps what the next entry pools, and as
    many tokens more as a rejected draft may have overwritten; a step's own rows never come from the pool.
    """
    window = PageGroup("window", sizes.window, model.sliding_window - 1 + limits.max_query_len)
    states = {
        kind.name: PageGroup(
            f"state {kind.name}", sizes.state_rows(kind), kind.state_window + decode_query_len
        )
        for kind in kinds
        if kind.ratio is not None
    }
    return window, PageGroup("context", sizes.context), states


class CachePools:
    """Pools and tables of the caches of some layers.

    Attributes:
        tables: Who holds which pages.
        layers: The caches of each layer, by layer index.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        layout: KVCacheLayout,
        sizes: PageSizes,
        limits: Limits,
        device: torch.device | str = "cpu",
        decode_query_len: int = 1,
        first_page: int = 0,
        allocate: Allocate = allocate_cache,
        scales: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """Allocate pools that hold `limits.max_requests` requests of `limits.max_model_len` tokens.

        Args:
            decode_query_len: Tokens that a rejected draft may take back.
            first_page: The first page of each pool that a request may get; those before it are nobody's.
            allocate: Makes each pool; they are zeroed and tight if left out.
            scales: By layer index, of formats with one scale a cache; 1 for layers that are left out.
        """
        model = layers[0].model
        kinds = dict.fromkeys(layer.kind for layer in layers)
        for kind in kinds:
            sizes.check_kind(kind)
        window, context, states = page_groups(model, kinds, sizes, limits, decode_query_len)

        def table(group: PageGroup) -> PagedTable:
            pages = first_page + group.held_pages(limits.max_model_len) * limits.max_requests
            return PagedTable(group, pages, limits.max_requests, limits.max_model_len, first_page)

        self.tables = CacheTables(
            table(window), table(context), {name: table(group) for name, group in states.items()}
        )
        self.layers = {
            layer.index: _layer_caches(
                layer, layout, sizes, self.tables, device, _scaled(allocate, scales.get(layer.index, 1.0))
            )
            for layer in layers
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(
            cache.num_pages * cache.page_stride_bytes
            for caches in self.layers.values()
            for cache in vars(caches).values()
            if cache is not None
        )


def _scaled(allocate: Allocate, scale: float) -> Allocate:
    """Pools with the scale, where their format has one."""

    def scaled(format: KVCacheFormat, pages: int, rows: int, device: torch.device | str) -> KVCache:
        cache = allocate(format, pages, rows, device)
        if format.scale != "tensor" or scale == 1.0:
            return cache
        return replace(cache, scale=torch.full((1,), scale, device=cache.pool.device))

    return scaled


def _layer_caches(
    layer: LayerSpec,
    layout: KVCacheLayout,
    sizes: PageSizes,
    tables: CacheTables,
    device: torch.device | str,
    allocate: Allocate,
) -> LayerCaches:
    model, kind = layer.model, layer.kind
    window = allocate(layout.window, tables.window.num_pages, sizes.window, device)
    if kind.ratio is None:
        return LayerCaches(window)
    state_pages, state_rows = tables.state[kind.name].num_pages, sizes.state_rows(kind)

    def state(width: int) -> KVCache:
        return allocate(layout.state.resized(kind.groups * width), state_pages, state_rows, device)

    entry_pages, entry_rows = tables.context.num_pages, sizes.compressed_rows(kind)
    compressed = allocate(layout.compressed, entry_pages, entry_rows, device)
    if kind.select != "top_k":
        return LayerCaches(window, compressed, state=state(model.head_dim))
    index = allocate(layout.index, entry_pages, entry_rows, device)
    return LayerCaches(window, compressed, index, state(model.head_dim), state(model.index_head_dim))


def bytes_per_token(layers: Iterable[LayerSpec], layout: KVCacheLayout) -> float:
    """Bytes that one more token of context costs in all `layers`, page padding excluded."""
    total = 0.0
    for layer in layers:
        if layer.kind.ratio is not None:
            row = layout.compressed.bytes_per_token
            row += layout.index.bytes_per_token if layer.kind.select == "top_k" else 0
            total += row / layer.kind.ratio
    return total
