"""Does a tensor fit the format it is handed over as? Asked before the first call, never on the hot path."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4core.api.errors import CacheError
from dsv4core.api.kvcache import KVCacheFormat, KVCacheLayout
from dsv4core.api.layer import LayerCaches, LayerSpec
from dsv4core.kvcache.cache import KVCache


def check_cache(cache: KVCache, name: str) -> None:
    """Check a pool's dtype, shape and strides against its format.

    Args:
        name: What to call the cache in messages, such as `layers.2 compressed cache`.

    Raises:
        CacheError: With the first thing that does not fit, what was found and what the format needs.
    """
    pool, format = cache.pool, cache.format
    expected = f"{format.name} pools are [pages, page_size, {format.row_width}] of {format.storage_dtype}"
    if pool.dtype != getattr(torch, format.storage_dtype) or pool.dim() != 3:
        found = f"{list(pool.shape)} of {str(pool.dtype).removeprefix('torch.')}"
        raise CacheError(f"{name}: {expected}, and the tensor is {found}; pass the pool as that view.")
    if pool.shape[2] != format.row_width:
        raise CacheError(f"{name}: {expected}, and the tensor's rows have {pool.shape[2]} elements.")
    if pool.stride()[1:] != (format.row_width, 1):
        raise CacheError(
            f"{name}: rows of a page must be contiguous (strides {format.row_width}, 1), and the tensor's "
            f"are {pool.stride(1)}, {pool.stride(2)}; only pages may be strided."
        )
    _check_page_stride(cache, name)
    _check_scale(cache, name)


def _check_page_stride(cache: KVCache, name: str) -> None:
    format, stride = cache.format, cache.page_stride_bytes
    content = format.bytes_per_token * cache.page_size
    if cache.num_pages > 1 and stride < content:
        raise CacheError(
            f"{name}: a page of {cache.page_size} {format.name} rows takes {content} B, and the page stride "
            f"is {stride} B; pages would overlap."
        )
    if stride % format.page_alignment:
        raise CacheError(
            f"{name}: {format.name} pages start at multiples of {format.page_alignment} B, and the page "
            "stride is "
            f"{stride} B; pad each page to {format.page_bytes(cache.page_size)} B."
        )
    if not format.strided_pages and stride != format.page_bytes(cache.page_size):
        raise CacheError(
            f"{name}: {format.name} pages must lie side by side ({format.page_bytes(cache.page_size)} B), "
            f"and the page stride is {stride} B; pass a pool of its own."
        )


def _check_scale(cache: KVCache, name: str) -> None:
    scale = cache.scale
    if scale is None:
        return
    if cache.format.scale != "tensor":
        raise CacheError(f"{name}: {cache.format.name} has no scale for the whole cache; pass none.")
    if scale.numel() != 1 or scale.dtype != torch.float32 or not (scale.isfinite() & (scale > 0)).all():
        raise CacheError(f"{name}: the cache's scale must be one positive finite fp32 element.")


def check_block_table(
    block_table: torch.Tensor, lengths: Sequence[int], page_tokens: int, num_pages: int, name: str
) -> None:
    """Check that the pages that `lengths` reach exist. Works on the host's copy of a table.

    Args:
        block_table: `[requests, pages]` integers. Entries beyond a request's length are not looked at.
        lengths: Tokens of each request.
        page_tokens: Raw tokens that a page stands for.
        num_pages: Pages of the pool.

    Raises:
        CacheError: A length needs more pages than the table has, or a needed page is not in the pool.
    """
    columns = block_table.shape[1]
    needed = [-(-length // page_tokens) for length in lengths]
    if max(needed, default=0) > columns:
        row = next(row for row, pages in enumerate(needed) if pages > columns)
        raise CacheError(
            f"{name}: request {row} has {lengths[row]} tokens, which need {needed[row]} pages of "
            f"{page_tokens} tokens, and its block table has {columns}."
        )
    outside = block_table >= num_pages
    if not outside.any():
        return
    outside &= torch.arange(columns) < torch.tensor(needed)[:, None]
    for row, page in outside.nonzero()[:1].tolist():
        raise CacheError(
            f"{name}: page {page} of request {row} is {int(block_table[row, page])} in the block table, and "
            f"the pool has {num_pages} pages."
        )


def check_caches(caches: LayerCaches, layer: LayerSpec, layout: KVCacheLayout, scale: float = 1.0) -> None:
    """Check that a layer has just the caches that its kind needs, in the layout's formats.

    Args:
        caches: The caches.
        layer: The layer.
        layout: The backend's formats.
        scale: The layer's (`LayerScales.kv`), where a format has one for the whole cache.

    Raises:
        CacheError: A cache is missing, superfluous, of another format or scale, or does not fit its format.
    """
    model, kind = layer.model, layer.kind
    expected: dict[str, KVCacheFormat | None] = dict.fromkeys(("compressed", "index", "state", "index_state"))
    if kind.ratio is not None:
        expected["compressed"] = layout.compressed
        expected["state"] = layout.state.resized(kind.groups * model.head_dim)
    if kind.select == "top_k":
        expected["index"] = layout.index
        expected["index_state"] = layout.state.resized(kind.groups * model.index_head_dim)
    for field, format in {"window": layout.window, **expected}.items():
        cache, name = getattr(caches, field), f"{layer.name} {field} cache"
        if (cache is None) != (format is None):
            state = "is missing" if cache is None else "was passed"
            raise CacheError(
                f"{name} {state}, and a {kind.name} layer {'has' if format else 'has no'} such cache."
            )
        if cache is not None and format is not None:
            if cache.format != format:
                raise CacheError(
                    f"{name} has format {_described(cache.format)}, and the backend's layout is "
                    f"{_described(format)}."
                )
            check_cache(cache, name)
            found = 1.0 if cache.scale is None else float(cache.scale)
            if format.scale == "tensor" and abs(found - scale) > 1e-6 * scale:
                raise CacheError(
                    f"{name} has a scale of {found:g}, and the layer's weights of {scale:g}: what one side "
                    "writes the other would read wrongly; give both the same."
                )


def _described(format: KVCacheFormat) -> str:
    return format.name if format.fp8 is None else f"{format.name} ({format.fp8})"
