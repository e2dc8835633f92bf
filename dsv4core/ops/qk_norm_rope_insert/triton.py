"""`qk_norm_rope_insert` in one kernel: queries and the key of a token are read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4core.fp8_triton import fp8_codes, reciprocal
from dsv4core.kvcache import KVCache
from dsv4core.kvcache.codecs_triton import cache_arguments, store_row
from dsv4core.model.rope_triton import rotated

HEADS = 8
"""Heads of one program: 4,096 values, 32 a thread."""


def qk_norm_rope_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    window: KVCache,
    slot_mapping: torch.Tensor,
    eps: float,
    padded_heads: int | None = None,
    q_dtype: torch.dtype | None = None,
    q_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the definition; the head dimension is a power of two."""
    tokens, heads, width = q.shape
    padded, dtype = padded_heads or heads, q_dtype or q.dtype
    out = torch.empty(tokens, padded, width, dtype=dtype, device=q.device)
    if tokens == 0:
        return out
    blocks = triton.cdiv(padded, HEADS)
    _insert[(tokens, blocks + 1)](
        q,
        kv,
        positions,
        rope,
        slot_mapping,
        out.view(torch.uint8) if dtype.itemsize == 1 else out,
        q_scale,
        heads,
        padded,
        slot_mapping.shape[0],
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        eps,
        **cache_arguments(window),
        HEADS=HEADS,
        WIDTH=width,
        ROPE=rope.shape[1],
        Q_FP8=dtype.itemsize == 1,
        Q_FNUZ=dtype == torch.float8_e4m3fnuz,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _insert(
    q,
    kv,
    positions,
    rope,
    slots,
    out,
    q_scale,
    heads,
    padded,
    stored,
    q_token,
    q_head,
    kv_token,
    eps,
    pool,
    page_stride,
    page_size,
    scale,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    Q_FP8: tl.constexpr,
    Q_FNUZ: tl.constexpr,
):
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    column = tl.arange(0, WIDTH)
    if block == tl.num_programs(1) - 1:
        slot = tl.load(slots + token, mask=token < stored, other=-1)
        if slot >= 0:
            key = tl.load(kv + token * kv_token + column).to(tl.float32)
            key = tl.reshape(rotated(key[None, :], rope, position, 1, 1, WIDTH, ROPE), (WIDTH,))
            store_row(key, slot, pool, page_stride, page_size, scale, FORMAT, FNUZ, WIDTH)
    else:
        head = block * HEADS + tl.arange(0, HEADS)
        here = (head < heads)[:, None]
        x = tl.load(q + token * q_token + head[:, None] * q_head + column[None, :], mask=here, other=0.0)
        x = x.to(tl.float32)
        mean = tl.sum(x * x, axis=1) / WIDTH
        x = rotated(x * tl.rsqrt(mean + eps)[:, None], rope, position, 1, HEADS, WIDTH, ROPE)
        target = out + (token * padded + head[:, None]) * WIDTH + column[None, :]
        if Q_FP8:
            if q_scale is not None:
                x = x * reciprocal(tl.load(q_scale))
            x = tl.where(here, fp8_codes(x, Q_FNUZ), 0)  # a zero that was turned may be negative
        tl.store(target, x.to(out.dtype.element_ty), mask=(head < padded)[:, None])
