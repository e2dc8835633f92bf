"""AITER's functions, each imported when it is first called: an import compiles, logs, and needs ROCm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from dsv4_plugin_rocm_aiter.ragged import RaggedLists
from dsv4_plugin_rocm_aiter.routes import Symbol
from dsv4core.api import ConfigError
from dsv4core.kvcache import KVCache
from dsv4core.ops.indexer.prompts import side_by_side

NO_SINK = -1e30
"""Its exponential is 0. Minus infinity is NaN where AITER subtracts it from itself: in lists of no row."""
PROGRAMS, HEADS, MOST_SPLITS = 256, 16, 16
"""Programs that a call is divided into, heads of each, and parts of a list at most: AITER's for gfx942."""
NOPE, ROPE = 448, 64


@dataclass(frozen=True, eq=False)
class Pool:
    """A pool, and the lists of its rows that queries attend."""

    cache: KVCache
    lists: RaggedLists


def decode_sparse(
    symbol: Symbol, q: torch.Tensor, pools: Sequence[Pool], scale: float, sinks: torch.Tensor
) -> torch.Tensor:
    """Attend rows in place.

    Parts of a list are given: AITER's own choice follows the length of the buffer, which a graph keeps.

    Args:
        symbol: The route's.
        q: `[tokens, heads, 512]` bf16.
        pools: As many as the symbol attends; lists without sentinels, but for -1 in those of no row.
        scale: Of the scores.
        sinks: `[heads]` fp32, finite.

    Returns:
        `[tokens, heads, 512]` bf16.
    """
    from aiter.ops.triton.attention.pa_decode_sparse import pa_decode_sparse

    window, *more = pools
    extra: dict[str, torch.Tensor] = {}
    if more:
        extra = {
            "extra_cache": more[0].cache.pool,
            "extra_indices": more[0].lists.indices,
            "extra_indptr": more[0].lists.starts,
        }
    rows = window.cache.pool if symbol.strided else flat_rows(window.cache)
    out: torch.Tensor = pa_decode_sparse(
        q=q,
        unified_kv=rows,
        kv_indices=window.lists.indices,
        kv_indptr=window.lists.starts,
        attn_sink=sinks,
        softmax_scale=scale,
        kv_splits=splits(*q.shape[:2]),
        has_invalid=not symbol.writes_empty_rows,
        **extra,
    )
    return out


def splits(tokens: int, heads: int) -> int:
    """Parts of each list, a power of two, so that a call fills a chip."""
    wanted = PROGRAMS // (tokens * -(-heads // HEADS))
    return 1 << (max(1, min(MOST_SPLITS, wanted)).bit_length() - 1)


def flat_rows(cache: KVCache) -> torch.Tensor:
    """Plain rows `[pages * page_size, 512]`, counted by slot.

    Raises:
        ConfigError: Pages are apart, so that slots do not count rows.
    """
    if cache.num_pages > 1 and cache.pool.stride(0) != cache.page_size * cache.pool.shape[2]:
        raise ConfigError(
            f"Pages are {cache.page_stride_bytes:,} bytes apart and take "
            f"{cache.page_size * cache.format.bytes_per_token:,}, and AITER's kernel counts rows side by "
            "side; say so in the request (strided_pages), or set backend.core=[decode]."
        )
    return cache.pool.reshape(-1, cache.pool.shape[2])


def prefill_opus(
    q: torch.Tensor, rows: torch.Tensor, lists: RaggedLists, scale: float, sinks: torch.Tensor
) -> torch.Tensor:
    """Attend rows `[rows, 512]` bf16 of a workspace; the second source of rows stays empty."""
    from aiter.ops.pa_sparse_prefill_opus import pa_sparse_prefill_opus

    out: torch.Tensor = pa_sparse_prefill_opus(
        q=q,
        unified_kv=rows,
        kv_indices_prefix=lists.indices,
        kv_indptr_prefix=lists.starts,
        kv=rows[:1],
        kv_indices_extend=lists.indices[:0],
        kv_indptr_extend=torch.zeros_like(lists.starts),
        attn_sink=sinks,
        softmax_scale=scale,
    )
    return out


def prefill_kernel(
    q: torch.Tensor, rows: torch.Tensor, lists: RaggedLists, scale: float, sinks: torch.Tensor
) -> torch.Tensor:
    """The same with the kernel itself: `pa_prefill_sparse` before it takes the truth of a tensor of sinks."""
    from aiter.ops.triton._triton_kernels.attention.sparse_attention_dsv4 import _sparse_attn_prefill_kernel

    out = torch.empty_like(q)
    tokens, heads, width = q.shape

    def grid(chosen: Mapping[str, int]) -> tuple[int, int]:
        return tokens, -(-heads // chosen["BLOCK_H"])

    _sparse_attn_prefill_kernel[grid](
        *(q, rows, lists.indices, lists.starts, sinks, out),
        *(*q.stride(), *rows.stride(), *out.stride()),
        *(heads, width, len(rows), scale),
        HAS_ATTN_SINK=True,
        BLOCK_D=width,
    )
    return out


def prefill_ragged(
    q: torch.Tensor, rows: torch.Tensor, lists: RaggedLists, scale: float, sinks: torch.Tensor
) -> torch.Tensor:
    """The same before AITER 0.1.20."""
    from aiter.ops.triton.attention.sparse_attention_dsv4 import sparse_attn_prefill

    out = torch.empty_like(q)
    sparse_attn_prefill(
        q=q,
        kv=rows[:, None],
        indices=lists.indices[:, None],
        topk_length=None,
        scale=scale,
        head_dim=NOPE + ROPE,
        nope_head_dim=NOPE,
        rope_head_dim=ROPE,
        attn_sink=sinks,
        output=out,
        ragged_indices=lists.indices,
        ragged_indptr=lists.starts,
    )
    return out


Decode = Callable[[Symbol, torch.Tensor, Sequence[Pool], float, torch.Tensor], torch.Tensor]
Prefill = Callable[[torch.Tensor, torch.Tensor, RaggedLists, float, torch.Tensor], torch.Tensor]

DECODES: Mapping[str, Decode] = MappingProxyType({"pa_decode_sparse": decode_sparse})
PREFILLS: Mapping[str, Prefill] = MappingProxyType(
    {
        "pa_sparse_prefill_opus": prefill_opus,
        "_sparse_attn_prefill_kernel": prefill_kernel,
        "sparse_attn_prefill": prefill_ragged,
    }
)
"""By the symbol that each calls."""


def prompt_logits(
    q: torch.Tensor, weights: torch.Tensor, keys: KVCache, pages: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Scores of one request's queries, whose keys are brought side by side.

    Args:
        q: `[tokens, heads, width]` e4m3fn. On gfx942 AITER turns its codes and those of keys into FNUZ's of
            half the value, which are the same codes except for -0.
        weights: `[tokens, heads]` fp32.
        keys: The index cache, FP8.
        pages: `[pages]` int32 of the request, as far as any of the queries sees.
        visible: `[tokens]` entries that each query sees.

    Returns:
        `[tokens, pages * page_size]` fp32; behind a query's entries lies anything.
    """
    from aiter.ops.triton.attention.fp8_mqa_logits import fp8_mqa_logits

    codes, scales = side_by_side(keys, pages)
    ends = visible.clamp(0, len(codes)).int()
    scores: torch.Tensor = fp8_mqa_logits(
        Q=q.contiguous(),
        KV=codes,
        kv_scales=scales,
        weights=weights.contiguous(),
        cu_starts=torch.zeros_like(ends),
        cu_ends=ends,
        clean_logits=False,
    )
    return scores


def top_k(logits: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """As the core's `index_topk`: NaN and minus infinity are taken away before and after AITER's selection.

    AITER ranks bits, by which -0 is below 0 and NaN above all, and chooses whatever a row has where it has
    `k` scores or fewer.
    """
    from aiter.ops.topk import top_k_per_row_prefill

    tokens, entries = logits.shape
    chosen = torch.full((tokens, k), -1, dtype=torch.int32, device=logits.device)
    if not tokens or not entries:
        return chosen
    scores = (logits + 0.0).masked_fill_(logits.isnan(), float("-inf"))
    ends = visible.clamp(0, entries).int()
    top_k_per_row_prefill(
        logits=scores,
        rowStarts=torch.zeros_like(ends),
        rowEnds=ends,
        indices=chosen,
        values=None,
        numRows=tokens,
        stride0=scores.stride(0),
        stride1=scores.stride(1),
        k=k,
        stable=True,
    )
    found = scores.gather(1, chosen.clamp_min(0).long())
    kept = (chosen >= 0) & (found > float("-inf"))
    ordered = torch.where(kept, chosen, torch.iinfo(torch.int32).max).sort(1).values
    return ordered.masked_fill_(ordered == torch.iinfo(torch.int32).max, -1)


def quantised(
    attention: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads rotated back, in FP8 by groups, a power of two for each 128 values.

    Args:
        attention: `[tokens, heads, 512]` bf16.
        positions: `[tokens]` int64.
        cos: `[max_positions, 32]` of attention's dtype.
        sin: The same.
        groups: Output groups of this rank.

    Returns:
        `[tokens, groups, heads / groups * 512]` FP8, and E8M0 scales of every 128 columns.
    """
    from aiter.ops.inverse_rope_group_quant import inverse_rope_group_quant

    codes, scale = inverse_rope_group_quant(
        o=attention.contiguous(),
        positions=positions,
        cos_cache=cos,
        sin_cache=sin,
        num_groups=groups,
        quant_group_size=128,
    )
    return codes, scale


def grouped_product(
    codes: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """`[tokens, groups, o_lora_rank]` bf16 of what `quantised` gave.

    Args:
        codes: `[tokens, groups, columns]` FP8.
        scale: Its scales.
        weight: `[groups, o_lora_rank, columns]` e4m3fn.
        weight_scale: `[groups, o_lora_rank / 128, columns / 128]` E8M0.
    """
    from aiter.ops.batched_gemm_op_a8w8 import batched_gemm_a8w8_mxscale

    product: torch.Tensor = batched_gemm_a8w8_mxscale(
        x=codes, wo_a=weight, x_scale=scale, w_scale=weight_scale, dtype=torch.bfloat16
    )
    return product
