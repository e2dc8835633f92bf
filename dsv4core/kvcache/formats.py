"""The cache formats, and which of them a user's dtype string means. No torch.

Byte layouts are those of public DeepSeek-V4 kernels: FlashMLA's packed pages, FlashInfer's plain rows,
DeepGEMM's index keys with one fp32 scale a row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from dsv4core.api.errors import ConfigError
from dsv4core.api.kvcache import FP8Flavour, KVCacheFormat, KVCacheLayout, KVCachePart
from dsv4core.api.model import ModelShape

PACKED_NOPE, PACKED_ROPE, PACKED_TILE = 448, 64, 64
PACKED_ALIGNMENT = 576  # FlashMLA's TMA descriptor has rows of 576 B; a page is a whole number of them
PLAIN_ALIGNMENT = 512
_PLAIN_DTYPES = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp32": "float32"}

KV_CACHE_DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "auto": ("fp8_ds_mla", "bf16"),
        "fp8": ("fp8_ds_mla", "fp8_e4m3"),
        "fp8_ds_mla": ("fp8_ds_mla",),
        "fp8_e4m3": ("fp8_e4m3", "fp8_ds_mla"),
        "bf16": ("bf16",),
        "bfloat16": ("bf16",),
        "fp32": ("fp32",),
    }
)
"""Requested kv_cache_dtype: formats that may serve it, the first one that a backend has."""

INDEX_DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"auto": ("fp8",), "fp8": ("fp8",), "bf16": ("bf16",), "fp32": ("fp32",)}
)
"""Requested index_dtype: formats of the indexer's keys that may serve it."""


def accepted_dtypes(table: Mapping[str, tuple[str, ...]], formats: Collection[str]) -> list[str]:
    """The strings of `table` that a backend with `formats` accepts."""
    return [name for name, choices in table.items() if any(choice in formats for choice in choices)]


def resolve_dtype(
    key: str, requested: str, table: Mapping[str, tuple[str, ...]], formats: Collection[str], backend: str
) -> str:
    """The format that `requested` means for a backend that has `formats`.

    Args:
        key: Name of the configuration value, for the message.
        requested: What the user wrote.
        table: `KV_CACHE_DTYPES` or `INDEX_DTYPES`.
        formats: Format names that the backend reads and writes.
        backend: The backend's name, for the message.

    Raises:
        ConfigError: `requested` is unknown, or none of its formats is the backend's.
    """
    for choice in table.get(requested, ()):
        if choice in formats:
            return choice
    accepted = ", ".join(accepted_dtypes(table, formats))
    raise ConfigError(
        f"{key}={requested} is not one that backend={backend} can store; it accepts: {accepted}."
    )


def _packed(model: ModelShape) -> KVCacheFormat:
    if (model.head_dim, model.qk_rope_head_dim) != (PACKED_NOPE + PACKED_ROPE, PACKED_ROPE):
        raise ConfigError(
            f"kv_cache_dtype=fp8_ds_mla stores heads of {PACKED_NOPE} + {PACKED_ROPE} rotary dimensions, and "
            f"this model has {model.head_dim - model.qk_rope_head_dim} + {model.qk_rope_head_dim}; "
            "ask for bf16, fp8_e4m3 or fp32 instead."
        )
    parts = (
        KVCachePart("nope", "float8_e4m3fn", PACKED_NOPE),
        KVCachePart("rope", "bfloat16", PACKED_ROPE),
        KVCachePart("scale", "uint8", PACKED_NOPE // PACKED_TILE + 1, region=1),
    )
    return KVCacheFormat(
        "fp8_ds_mla", parts, "ue8m0_tile", "e4m3fn", PACKED_TILE, page_alignment=PACKED_ALIGNMENT
    )


def _plain(name: str, part: str, width: int, alignment: int) -> KVCacheFormat:
    parts = (KVCachePart(part, _PLAIN_DTYPES[name], width),)
    if name == "fp8_e4m3":
        return KVCacheFormat(name, parts, "tensor", "e4m3fn", page_alignment=alignment)
    return KVCacheFormat(name, parts, page_alignment=alignment)


def _index(name: str, width: int, alignment: int) -> KVCacheFormat:
    if name != "fp8":
        return replace(_plain(name, "key", width, alignment), name=f"index_{name}")
    parts = (KVCachePart("key", "float8_e4m3fn", width), KVCachePart("scale", "float32", 1, region=1))
    return KVCacheFormat("index_fp8", parts, "fp32_row", "e4m3fn", width, page_alignment=alignment)


def cache_layout(model: ModelShape, kv_format: str, index_format: str) -> KVCacheLayout:
    """The formats of all caches of a model.

    Args:
        kv_format: `fp8_ds_mla`, `bf16`, `fp8_e4m3` or `fp32`, for window and compressed caches.
        index_format: `fp8`, `bf16` or `fp32`, for the indexer's keys.

    Raises:
        ConfigError: The packed format is asked for a model with other head dimensions.
    """
    packed = kv_format == "fp8_ds_mla"
    alignment = PACKED_ALIGNMENT if packed else PLAIN_ALIGNMENT
    rows = _packed(model) if packed else _plain(kv_format, "row", model.head_dim, alignment)
    state = (KVCachePart("kv", "float32", model.head_dim), KVCachePart("score", "float32", model.head_dim))
    return KVCacheLayout(
        window=rows,
        compressed=rows,
        index=_index(index_format, model.index_head_dim, alignment),
        state=KVCacheFormat("state", state, page_alignment=alignment),
    )


def with_fp8_flavour(format: KVCacheFormat, flavour: FP8Flavour) -> KVCacheFormat:
    """The same format with its FP8 codes read and written as `flavour` (FNUZ on gfx942)."""
    parts = tuple(
        replace(part, dtype=f"float8_{flavour}") if part.dtype.startswith("float8") else part
        for part in format.parts
    )
    return replace(format, parts=parts, fp8=flavour)
