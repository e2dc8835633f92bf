"""`x @ W^T`, accumulated in fp32."""

from __future__ import annotations

import torch

from dsv4core.api.layer import Weight
from dsv4core.model.blocks import dequantize_block


def prepare_linear(weight: Weight) -> Weight:
    """Bring a weight into the form that `linear` multiplies with: fp32, scales applied. Done once a layer."""
    if weight.scale is None:
        return Weight(weight.data.float())
    assert weight.block is not None
    return Weight(dequantize_block(weight.data, weight.scale, weight.block))


def linear(x: torch.Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Multiply rows with a prepared weight.

    Activations are not quantised: that is a kernel's economy, not part of the definition.

    Args:
        x: `[tokens, in]`.
        weight: From `prepare_linear`, `[out, in]`.
        out_dtype: Dtype of the result; that of `x` if None.

    Returns:
        `[tokens, out]`.
    """
    return torch.nn.functional.linear(x.float(), weight.data).to(out_dtype or x.dtype)
