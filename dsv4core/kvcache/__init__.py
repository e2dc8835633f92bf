"""KV caches: formats as values, codecs between bytes and numbers, paged pools, checks.

The formats need no torch and are imported at once; what handles tensors is imported when it is first used,
so that selection stays torch-free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsv4core.kvcache.formats import (
    INDEX_DTYPES,
    KV_CACHE_DTYPES,
    accepted_dtypes,
    cache_layout,
    resolve_dtype,
    with_fp8_flavour,
)

if TYPE_CHECKING:
    from dsv4core.kvcache.cache import KVCache, allocate_cache
    from dsv4core.kvcache.checks import check_block_table, check_cache, check_caches
    from dsv4core.kvcache.codecs import decode_rows, encode_rows
    from dsv4core.kvcache.pages import PagedTable, PageGroup

_LAZY = {
    "KVCache": "cache",
    "allocate_cache": "cache",
    "check_block_table": "checks",
    "check_cache": "checks",
    "check_caches": "checks",
    "decode_rows": "codecs",
    "encode_rows": "codecs",
    "PageGroup": "pages",
    "PagedTable": "pages",
}

__all__ = [
    "INDEX_DTYPES",
    "KV_CACHE_DTYPES",
    "KVCache",
    "PageGroup",
    "PagedTable",
    "accepted_dtypes",
    "allocate_cache",
    "cache_layout",
    "check_block_table",
    "check_cache",
    "check_caches",
    "decode_rows",
    "encode_rows",
    "resolve_dtype",
    "with_fp8_flavour",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
