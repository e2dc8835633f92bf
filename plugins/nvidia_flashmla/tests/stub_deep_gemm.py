"""DeepGEMM's paged scores in plain torch, with what sm_90's kernel refuses; as of sgl-deep-gemm 0.1.4."""

from __future__ import annotations

from typing import Any

import torch


def get_num_sms() -> int:
    return 132


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: None = None
) -> torch.Tensor:
    assert context_lens.dtype == torch.int32
    assert context_lens.dim() == 2
    assert context_lens.is_contiguous()
    assert bool((context_lens > 0).all()), "The kernel reads out of bounds without any work."
    assert block_kv == 64
    assert num_sms == get_num_sms()
    schedule = torch.zeros(num_sms + 1, 2, dtype=torch.int32)
    schedule[0, 0] = int(context_lens.sum())
    return schedule


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool = False,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    keys, scale = kv
    tokens, heads, width = q.shape
    assert q.dtype == keys.dtype == torch.float8_e4m3fn
    assert heads in (32, 64)
    assert q.is_contiguous()
    assert keys.is_contiguous()
    assert keys.shape == (len(scale), width)
    assert scale.dtype == weights.dtype == torch.float32
    assert weights.shape == (tokens, heads)
    assert weights.is_contiguous()
    assert not clean_logits
    for bounds in (ks, ke):
        assert bounds.dtype == torch.int32
        assert bounds.shape == (tokens,)
    assert bool(((ks < ke) & (ke <= len(keys))).all())
    logits = torch.full((tokens, len(keys)), float("nan"))
    for token, (first, end) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
        scores = (q[token].float() @ keys[first:end].float().T).relu() * scale[first:end]
        logits[token, first:end] = weights[token] @ scores
    return logits


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Any = None,
) -> torch.Tensor:
    tokens, queries, heads, width = q.shape
    assert queries == 1
    assert q.dtype == torch.float8_e4m3fn
    assert heads in (32, 64)
    assert kv_cache.dtype == torch.uint8
    assert kv_cache.shape[1:] == (64, 1, width + 4)
    assert kv_cache.stride(1) == width + 4
    assert weights.dtype == torch.float32
    assert weights.shape == (tokens, heads)
    assert weights.is_contiguous()
    assert context_lens.shape == (tokens, 1)
    assert block_table.shape[0] == tokens
    assert block_table.dtype == torch.int32
    assert block_table.stride(1) == 1
    assert schedule_meta.shape == (get_num_sms() + 1, 2)
    assert schedule_meta[0, 0] == context_lens.sum(), "A schedule of other lengths."
    logits = torch.full((tokens, max_context_len), float("nan"))
    for token in range(tokens):
        count = int(context_lens[token, 0])
        pages = block_table[token, : -(-count // 64)].long()
        assert bool(((pages >= 0) & (pages < len(kv_cache))).all()), "A page is out of bounds."
        flat = kv_cache[pages].reshape(len(pages), -1)
        keys = flat[:, : 64 * width].contiguous().view(torch.float8_e4m3fn).float().view(-1, width)
        scale = flat[:, 64 * width :].contiguous().view(torch.float32).flatten()
        scores = (q[token, 0].float() @ keys.T).relu() * scale
        seen = min(count, max_context_len)
        logits[token, :seen] = (weights[token] @ scores)[:seen]
    return logits
