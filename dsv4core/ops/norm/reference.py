"""RMS norm, shared by several operations."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`x * rsqrt(mean(x²) + eps) * weight` over the last dimension, fp32 inside, rounded once to `x.dtype`.

    Args:
        x: `[..., width]`.
        weight: `[width]`, or None for a norm without weights.
    """
    scale = None if weight is None else weight.float()
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)


def latent_norms(
    latent: torch.Tensor, kv: torch.Tensor, latent_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of what a layer projects its input to: the query latent, and the keys.

    Args:
        latent: `[tokens, q_lora_rank]`; rows may be apart.
        kv: `[tokens, head_dim]`, likewise.
        latent_weight: `[q_lora_rank]`.
        kv_weight: `[head_dim]`.
        eps: Added to the means of squares.

    Returns:
        Both, normalised, in their dtypes, contiguous.
    """
    return rms_norm(latent, latent_weight, eps), rms_norm(kv, kv_weight, eps)
