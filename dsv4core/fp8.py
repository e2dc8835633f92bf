"""FP8 with power-of-two scales: the arithmetic that caches, weights and activations share."""

from __future__ import annotations

import math

import torch

FP8_MAX = {"e4m3fn": 448.0, "e4m3fnuz": 224.0}  # FNUZ writers clamp at 224, half of OCP's largest code
MIN_AMAX = 1e-4  # floor of a cached tile's magnitude: an all-zero tile gets exponent -22, byte 105


def power_of_two_exponent(amax: torch.Tensor, fp8_max: float = FP8_MAX["e4m3fn"]) -> torch.Tensor:
    """`ceil(log2(amax / fp8_max))`, exact on any device: no logarithm, and no division, which GPUs round.

    Args:
        amax: Positive fp32 magnitudes.

    Returns:
        int32 exponents of the same shape; 128 where `amax` is infinite or NaN, so that the scale shows it.
    """
    limit, power = math.frexp(fp8_max)  # 448 is 0.875 * 2 ** 9
    mantissa, exponent = torch.frexp(amax)
    return torch.where(amax.isfinite(), exponent - power + (mantissa > limit).int(), 128)


def to_fp8(values: torch.Tensor, flavour: str = "e4m3fn") -> torch.Tensor:
    """Clamp to the largest code and round to the nearest one, ties to even; NaN stays NaN."""
    dtype: torch.dtype = getattr(torch, f"float8_{flavour}")
    return values.clamp(-FP8_MAX[flavour], FP8_MAX[flavour]).to(dtype)
