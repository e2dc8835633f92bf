"""The query and key side of a layer before attention, fp32 inside, each result rounded once."""

from __future__ import annotations

import torch

from dsv4core.fp8 import to_fp8
from dsv4core.kvcache import KVCache
from dsv4core.model.rope import rotate
from dsv4core.ops.norm import rms_norm


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
    """Weightless RMS norm and RoPE of each query head; RoPE of the key, stored in the window cache.

    The rotary dimensions are the last ones, in interleaved pairs.

    Args:
        q: `[tokens, heads, head_dim]`, straight from `wq_b`.
        kv: `[tokens, head_dim]`, after `kv_norm`.
        positions: `[tokens]` int64.
        rope: `[max_positions, rope_dim]` fp32.
        window: The layer's window cache.
        slot_mapping: `[n]` int64 with n <= tokens; tokens beyond it, and those with -1, store no key.
        eps: Of the norm.
        padded_heads: Heads of the result; those beyond `heads` are exact zeros. None pads nothing.
        q_dtype: Dtype of the result; that of `q` if None. FP8 values are divided by `q_scale` and clamped.
        q_scale: One fp32 element for an FP8 result; None means 1.

    Returns:
        `[tokens, padded_heads, head_dim]` of `q_dtype`.
    """
    heads = torch.cat([rms_norm(q.float(), None, eps), kv.float()[:, None]], dim=1)
    rotated = rotate(heads, positions, rope)
    window.write(slot_mapping, rotated[: slot_mapping.shape[0], -1])
    rotated = rotated[:, :-1]
    if padded_heads is not None and padded_heads > q.shape[1]:
        rotated = torch.nn.functional.pad(rotated, (0, 0, 0, padded_heads - q.shape[1]))
    if q_dtype is not None and q_dtype.itemsize == 1:
        scaled = rotated if q_scale is None else rotated * q_scale.reciprocal()
        return to_fp8(scaled, str(q_dtype).removeprefix("torch.float8_"))
    return rotated.to(q_dtype or q.dtype)
