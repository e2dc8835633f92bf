"""The output projection of one layer: weights prepared once, for definitions, kernels or DeepGEMM."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal

import torch

from dsv4core.api.errors import DSV4Error
from dsv4core.api.layer import LayerSpec, LayerWeights
from dsv4core.model.blocks import has_power_of_two_blocks


class OutputProjection:
    """`wo_a` and `wo_b` of one layer.

    Attributes:
        product: Who multiplies with `wo_a`.
    """

    def __init__(
        self, layer: LayerSpec, weights: LayerWeights, operations: ModuleType, deep_gemm: bool = False
    ) -> None:
        """Prepare the weights, as far as the host gives them.

        Args:
            layer: The layer.
            weights: Its weights.
            operations: `dsv4core.ops`, or `dsv4core.ops.triton`.
            deep_gemm: Whether DeepGEMM multiplies with `wo_a`, where it is as DeepGEMM takes it.
        """
        self._layer, self._rope = layer, weights.rope
        self.product: Literal["core", "deepgemm"] = "core"
        self._project: Any = operations.o_proj
        self._weights: tuple[Any, ...] = tuple(
            operations.prepare_linear(weights[name]) for name in ("wo_a", "wo_b") if name in weights.tensors
        )
        if deep_gemm and len(self._weights) == 2:
            from dsv4core.ops.o_proj import deepgemm

            if has_power_of_two_blocks(weights["wo_a"], layer.num_groups, deepgemm.BLOCK):
                wo_a = deepgemm.prepare_wo_a(weights["wo_a"], layer.num_groups)
                self._weights = (wo_a, self._weights[1])
                self.product, self._project = "deepgemm", deepgemm.o_proj

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights."""
        return sum(weight.nbytes for weight in self._weights)

    def __call__(
        self, attention: torch.Tensor, positions: torch.Tensor, shares: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rotate back and project to `[tokens, hidden_size]`.

        Args:
            attention: `[tokens, heads, head_dim]`, unpadded.
            positions: `[tokens]` int64.
            shares: `[tokens, heads]` fp32 that heads are multiplied with first, with DeepGEMM alone.

        Raises:
            DSV4Error: The host kept the output projection's weights to itself.
        """
        if len(self._weights) != 2:
            raise DSV4Error(
                f"{self._layer.name} was asked for its output projection and was built without wo_a and wo_b;"
                " pass them with its weights, or project in the host."
            )
        further = () if shares is None else (shares,)
        projected: torch.Tensor = self._project(
            attention, positions, self._rope, *self._weights, self._layer.num_groups, *further
        )
        return projected
