"""FP8 with power-of-two scales: the arithmetic that caches, weights and activations share."""

from __future__ import annotations

import torch

FP8_MAX = {"e4m3fn": 448.0, "e4m3fnuz": 224.0}  # FNUZ writers clamp at 224, half of OCP's largest code
MIN_AMAX = 1e-4  # floor of a cached tile's magnitude: an all-zero tile gets exponent -22, byte 105


def power_of_two_exponent(amax: torch.Tensor, fp8_max: float = FP8_MAX["e4m3fn"]) -> torch.Tensor:
    """`ceil(log2(amax / fp8_max))`, exact: from the float's own exponent, without a logarithm.

    Args:
        amax: Positive fp32 magnitudes.

    Returns:
        int32 exponents of the same shape; 128 where `amax` is infinite or NaN, so that the scale shows it.
    """
    mantissa, exponent = torch.frexp(amax / fp8_max)  # 0.5 <= mantissa < 1
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.where(amax.isfinite(), exponent, 128)


def to_fp8(values: torch.Tensor, flavour: str = "e4m3fn") -> torch.Tensor:
    """Clamp to the largest code and round to the nearest one, ties to even; NaN stays NaN."""
    dtype: torch.dtype = getattr(torch, f"float8_{flavour}")
    return values.clamp(-FP8_MAX[flavour], FP8_MAX[flavour]).to(dtype)
