"""The output projection with FP8 weights: heads rotated back, then each group's product, then that of all."""

from __future__ import annotations

import torch

from dsv4core.api.layer import Weight
from dsv4core.ops.linear.triton import RotateBack, grouped_linear, linear


def o_proj(
    attention: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    wo_a: Weight,
    wo_b: Weight,
    groups: int,
) -> torch.Tensor:
    """As the definition, for weights from the kernels' `prepare_linear`."""
    rotate_back = RotateBack(positions, rope, attention.shape[2])
    return linear(grouped_linear(attention.flatten(1), wo_a, groups, rotate_back=rotate_back), wo_b)
