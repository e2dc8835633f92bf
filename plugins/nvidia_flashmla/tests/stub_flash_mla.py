"""A FlashMLA in plain torch: it computes what the real one computes, and refuses what that refuses.

Signatures are those of sgl-flash-mla 1.0.0. What its kernels read out of bounds, or would find stale, fails
here; so does what must be NaN or poison in memory that nobody may look at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

NOPE, ROPE, TILE, DATA, RECORD = 448, 64, 64, 576, 584
HEADS = (64, 128)


@dataclass
class Schedule:
    """A holder; what it was filled for."""

    made_for: tuple[Any, ...] | None = None
    lengths: tuple[torch.Tensor | None, ...] = ()


def has_legacy() -> bool:
    return True


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[Schedule, None]:
    return Schedule(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Schedule,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert use_legacy, "Kernels for the rows of DeepSeek-V4 are legacy ones."
    assert kv_format == "V4", "584 bytes a row are V4's."
    assert is_fp8_kvcache is not False
    assert not causal
    assert head_dim_v == 512
    assert indices is not None
    batch = _check_queries(q, 4)
    _check_sinks(attn_sink, q.shape[2])
    pools = [(k_cache, indices, topk_length)]
    if extra_k_cache is not None:
        assert extra_indices_in_kvcache is not None
        pools.append((extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
    else:
        assert extra_indices_in_kvcache is None
        assert extra_topk_length is None
    for cache, slots, lengths in pools:
        _check_pool(cache)
        _check_table(slots, (batch, q.shape[1]), 64)
        _check_lengths(lengths, batch)
    _check_schedule(tile_scheduler_metadata, q, pools)
    rows = torch.cat([_read(cache, slots, lengths) for cache, slots, lengths in pools], dim=2)
    named = torch.cat([_named(slots, lengths) for _, slots, lengths in pools], dim=2)
    out, lse = _attend(q, rows, named, softmax_scale or 512**-0.5, attn_sink)
    return out, lse.transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert use_legacy
    assert d_v == 512
    tokens = _check_queries(q, 3)
    _check_sinks(attn_sink, q.shape[1])
    assert kv.dtype == torch.bfloat16
    assert kv.shape[1:] == (1, 512)
    assert kv.stride(-1) == 1
    _check_table(indices, (tokens, 1), 128)
    _check_lengths(topk_length, tokens)
    named = _named(indices, topk_length) & (indices < len(kv))
    behind = ~_named(torch.zeros_like(indices), topk_length)
    assert bool((indices[behind] == -1).all()), "A row behind the length may be NaN, and reach the output."
    rows = kv[:, 0].float()[torch.where(named, indices, 0).long()]
    out, lse = _attend(q[:, None], rows, named, sm_scale, attn_sink)
    return out[:, 0], torch.zeros_like(lse[:, 0]), lse[:, 0]


def _check_queries(q: torch.Tensor, dimensions: int) -> int:
    assert q.dtype == torch.bfloat16
    assert q.dim() == dimensions
    assert q.shape[-1] == 512
    assert q.shape[-2] in HEADS, f"{q.shape[-2]} heads, and kernels have 64 or 128."
    assert q.stride(-1) == 1
    assert q.shape[0] > 0, "A grid of nothing cannot be launched."
    return q.shape[0]


def _check_sinks(sinks: torch.Tensor | None, heads: int) -> None:
    if sinks is not None:
        assert sinks.dtype == torch.float32
        assert sinks.shape == (heads,)
        assert sinks.is_contiguous()


def _check_pool(cache: torch.Tensor) -> None:
    assert cache.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn)
    assert cache.dim() == 4
    assert cache.shape[2:] == (1, RECORD)
    assert cache.stride(1) == RECORD
    assert cache.stride(0) % DATA == 0, f"Pages are {cache.stride(0)} bytes apart."
    assert cache.data_ptr() % 16 == 0


def _check_table(slots: torch.Tensor, size: tuple[int, int], multiple: int) -> None:
    assert slots.dtype == torch.int32
    assert slots.shape[:2] == size
    assert slots.shape[2] % multiple == 0, f"{slots.shape[2]} columns are no multiple of {multiple}."
    assert slots.stride(2) == 1
    assert slots.stride(0) % 2 == 0
    assert slots.data_ptr() % 8 == 0


def _check_lengths(lengths: torch.Tensor | None, batch: int) -> None:
    if lengths is not None:
        assert lengths.dtype == torch.int32
        assert lengths.shape == (batch,)
        assert lengths.is_contiguous()


def _check_schedule(schedule: Schedule, q: torch.Tensor, pools: list[tuple[Any, Any, Any]]) -> None:
    """A schedule is for one shape, and, which the real one does not check, for one step's lengths."""
    shape = (q.shape, *((cache.shape[1], slots.shape[2]) for cache, slots, _ in pools))
    lengths = tuple(None if own is None else own.clone() for _, _, own in pools)
    if schedule.made_for is None:
        schedule.made_for, schedule.lengths = shape, lengths
    assert schedule.made_for == shape
    for made, now in zip(schedule.lengths, lengths, strict=True):
        assert (made is None) == (now is None)
        assert made is None or torch.equal(made, now), "A schedule of other lengths."


def _named(slots: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    column = torch.arange(slots.shape[2])
    seen = column < (slots.shape[2] if lengths is None else lengths[:, None, None])
    return seen & (slots != -1)


def _read(cache: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """`[batch, queries, width, 512]`, NaN where nothing is named."""
    pages, size = cache.shape[:2]
    named = _named(slots, lengths)
    found = slots[named].long()
    assert ((found >= 0) & (found < pages * size)).all(), "A slot is out of bounds."
    flat = cache.view(torch.uint8).as_strided((pages, cache.stride(0)), (cache.stride(0), 1))
    page, row = found // size, found % size
    data = flat[page[:, None], row[:, None] * DATA + torch.arange(DATA)]
    scale = flat[page[:, None], size * DATA + row[:, None] * 8 + torch.arange(NOPE // TILE)]
    codes = data[:, :NOPE].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, TILE))
    values = torch.ldexp(codes, scale.int()[..., None] - 127).flatten(1)
    rows = torch.full((*slots.shape, 512), math.nan)
    rows[named] = torch.cat([values, data[:, NOPE:].contiguous().view(torch.bfloat16).float()], dim=1)
    return rows


def _attend(
    q: torch.Tensor, rows: torch.Tensor, named: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[batch, queries, heads, 512]`, and the log-sum-exp, plus infinity where there is nothing.

    NaN of a row that is named comes through.
    """
    rows = torch.where(named[..., None], rows, 0.0)
    scores = torch.einsum("bqhd,bqkd->bqhk", q.float(), rows) * scale
    scores = scores.masked_fill(~named[:, :, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(named[:, :, None], (scores - lse[..., None]).exp(), 0.0)
    out = torch.einsum("bqhk,bqkd->bqhd", weights, rows)
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks)[..., None].nan_to_num()
    return out.bfloat16(), torch.where(lse == -math.inf, math.inf, lse)
