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
