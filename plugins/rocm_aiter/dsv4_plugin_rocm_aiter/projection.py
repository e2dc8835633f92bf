"""The output projection of one layer, by who multiplies with `wo_a` and who rotates back before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from dsv4_plugin_rocm_aiter import calls
from dsv4_plugin_rocm_aiter.plugin import Plan
from dsv4core.api import LayerSpec, LayerWeights
from dsv4core.attention import core_operations
from dsv4core.model.blocks import dequantize_block, has_power_of_two_blocks
from dsv4core.model.rope import rotate_back
from dsv4core.ops.o_proj.prepared import OutputProjection


class Projection(Protocol):
    """Rotates heads back and projects them."""

    @property
    def product(self) -> str:
        """Who multiplies with `wo_a`."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights."""
        ...

    def __call__(self, attention: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """From `[tokens, heads, 512]` to `[tokens, hidden_size]`."""
        ...


def projection(layer: LayerSpec, weights: LayerWeights, plan: Plan) -> Projection:
    """The planned one; the einsum where `wo_a` is not as AITER multiplies it.

    That is FP8 in blocks of 128 x 128 whose scales are powers of two: others would be rounded to E8M0. At the
    kernel seam a host keeps the weights, and the core's says so when it is called.
    """
    operations = core_operations(plan)
    if plan.rotates_back == "projection" or not {"wo_a", "wo_b"} <= set(weights.tensors):
        return OutputProjection(layer, weights, operations)
    if plan.rotates_back == "quantisation" and has_power_of_two_blocks(weights["wo_a"], layer.num_groups):
        return Quantised(layer, weights, operations)
    return Einsum(layer, weights, operations, _rotation(plan))


def _rotation(plan: Plan) -> Callable[..., torch.Tensor]:
    """The inverse RoPE by itself: the definition, or the core's kernel."""
    if plan.core_ops == "torch":
        return rotate_back
    from dsv4core.ops.inverse_rope_quant.triton import inverse_rope

    return inverse_rope


class Quantised:
    """AITER's two kernels: rotated back and quantised in one, FP8 codes multiplied by groups in the other."""

    product = "aiter"

    def __init__(self, layer: LayerSpec, weights: LayerWeights, operations: Any) -> None:
        wo_a, groups = weights["wo_a"], layer.num_groups
        assert wo_a.scale is not None  # or it would not be served
        self._groups, self._linear = groups, operations.linear
        self._weight = wo_a.data.contiguous().unflatten(0, (groups, -1))
        exponents = wo_a.scale.float().to(torch.float8_e8m0fnu).view(torch.uint8)
        self._scale = exponents.contiguous().unflatten(0, (groups, -1))
        self._wo_b = operations.prepare_linear(weights["wo_b"])
        # AITER takes cosines and sines in the activations' dtype.
        cos, sin = weights.rope.bfloat16().chunk(2, dim=1)
        self._cos, self._sin = cos.contiguous(), sin.contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights and angles."""
        own = (self._weight, self._scale, self._cos, self._sin, self._wo_b)
        return sum(part.nbytes for part in own)

    def __call__(self, attention: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate back and project."""
        tokens = len(attention)
        low_rank = attention.new_empty(tokens, self._weight.shape[0] * self._weight.shape[1])
        if tokens:
            codes, scale = calls.quantised(attention, positions, self._cos, self._sin, self._groups)
            low_rank = calls.grouped_product(codes, scale, self._weight, self._scale).flatten(1)
        projected: torch.Tensor = self._linear(low_rank, self._wo_b)
        return projected


class Einsum:
    """`wo_a` in bf16, as torch multiplies it for all groups at once: twice its bytes in FP8."""

    product = "einsum"

    def __init__(
        self,
        layer: LayerSpec,
        weights: LayerWeights,
        operations: Any,
        rotated: Callable[..., torch.Tensor],
    ) -> None:
        wo_a = weights["wo_a"]
        plain = wo_a.data
        if wo_a.scale is not None:
            assert wo_a.block is not None
            plain = dequantize_block(wo_a.data, wo_a.scale, wo_a.block)
        self._weight = plain.bfloat16().unflatten(0, (layer.num_groups, -1)).contiguous()
        self._wo_b, self._linear = operations.prepare_linear(weights["wo_b"]), operations.linear
        self._rotated, self._rope = rotated, weights.rope

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights."""
        return int(self._weight.nbytes + self._wo_b.nbytes)

    def __call__(self, attention: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate back and project."""
        groups, rank, columns = self._weight.shape
        rotated = self._rotated(attention, positions, self._rope).reshape(-1, groups, columns)
        low_rank = torch.einsum("tgc,grc->tgr", rotated, self._weight)
        projected: torch.Tensor = self._linear(low_rank.reshape(-1, groups * rank), self._wo_b)
        return projected
