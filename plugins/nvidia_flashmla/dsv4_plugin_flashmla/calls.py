"""FlashMLA's two kernels, called alike whatever distribution they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flash_mla
import torch

from dsv4_plugin_flashmla import library
from dsv4core.api import ConfigError
from dsv4core.kvcache import KVCache

DECODE_MORE, PREFILL_MORE = library.flavour(flash_mla)
"""Arguments that this distribution needs besides."""
PAGE_MULTIPLE = 576
"""Bytes that page strides are a multiple of: sm_100's kernels load pages by TMA, as rows of 576 bytes."""


@dataclass(frozen=True, eq=False)
class Pool:
    """A pool, and what queries attend of it.

    Attributes:
        cache: Packed rows.
        slots: `[tokens, width]` int32, -1 for nothing; `width` a multiple of 64, with 128 heads of 128.
        lengths: `[tokens]` int32: columns that are looked at, from the front.
    """

    cache: KVCache
    slots: torch.Tensor
    lengths: torch.Tensor


def schedule() -> Any:
    """A holder of a tile schedule, which the first decode fills: for calls of these very lengths alone."""
    holder, _ = flash_mla.get_mla_metadata()
    return holder


def decode(
    q: torch.Tensor, pools: Sequence[Pool], scale: float, sinks: torch.Tensor | None, holder: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend packed rows in place, each query a row of a batch.

    Args:
        q: `[tokens, heads, 512]` bf16, 64 or 128 heads.
        pools: One or two.
        scale: Of the scores.
        sinks: `[heads]` fp32, or None.
        holder: From `schedule`.

    Returns:
        `[tokens, heads, 512]` bf16, the kernel's own memory; and `[tokens, heads]` fp32 log-sum-exp, minus
        infinity where nothing is attended.
    """
    window, *more = pools
    extra: dict[str, Any] = {}
    if more:
        extra = {
            "extra_k_cache": _rows(more[0].cache),
            "extra_indices_in_kvcache": more[0].slots[:, None],
            "extra_topk_length": more[0].lengths,
        }
    out, lse = flash_mla.flash_mla_with_kvcache(
        q=q[:, None],
        k_cache=_rows(window.cache),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=512,
        tile_scheduler_metadata=holder,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=window.slots[:, None],
        attn_sink=sinks,
        topk_length=window.lengths,
        **extra,
        **DECODE_MORE,
    )
    return out[:, 0], lse[..., 0]


def prefill(
    q: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend bf16 rows.

    Args:
        q: `[tokens, heads, 512]` bf16, 64 or 128 heads.
        rows: `[rows, 512]` bf16.
        table: `[tokens, width]` int32 numbers of rows, -1 for nothing; `width` a multiple of 128.
        lengths: `[tokens]` int32: columns that are looked at, from the front.
        scale: Of the scores.
        sinks: `[heads]` fp32, or None.

    Returns:
        As `decode`.
    """
    out, _, lse = flash_mla.flash_mla_sparse_fwd(
        q=q,
        kv=rows[:, None],
        indices=table[:, None],
        sm_scale=scale,
        d_v=512,
        attn_sink=sinks,
        topk_length=lengths,
        **PREFILL_MORE,
    )
    return out, lse


def contract_lse(lse: torch.Tensor, heads: int) -> torch.Tensor:
    """`[tokens, heads]` of unpadded heads; FlashMLA has plus infinity where nothing is attended."""
    own = lse[:, :heads]
    return own.masked_fill(own == float("inf"), float("-inf"))


def _rows(cache: KVCache) -> torch.Tensor:
    """A pool as FlashMLA takes it, `[pages, page_size, 1, 584]`.

    Raises:
        ConfigError: Pages are apart by what the kernels cannot load.
    """
    if cache.page_stride_bytes % PAGE_MULTIPLE:
        raise ConfigError(
            f"Pages are {cache.page_stride_bytes:,} bytes apart, and FlashMLA loads pages at multiples of "
            f"{PAGE_MULTIPLE}; give a stride of "
            f"{-(-cache.page_stride_bytes // PAGE_MULTIPLE) * PAGE_MULTIPLE:,} bytes, or use backend=triton."
        )
    return cache.pool[:, :, None]
