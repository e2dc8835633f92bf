"""The output projection of the core's own backends: weights prepared once, for definitions or for kernels."""

from __future__ import annotations

from types import ModuleType

import torch

from dsv4core.api.errors import DSV4Error
from dsv4core.api.layer import LayerSpec, LayerWeights


class OutputProjection:
    """`wo_a` and `wo_b` of one layer."""

    def __init__(self, layer: LayerSpec, weights: LayerWeights, operations: ModuleType) -> None:
        """Prepare the weights, as far as the host gives them.

        Args:
            layer: The layer.
            weights: Its weights.
            operations: `dsv4core.ops`, or `dsv4core.ops.triton`.
        """
        self._layer, self._rope, self._operations = layer, weights.rope, operations
        self._weights = tuple(
            operations.prepare_linear(weights[name]) for name in ("wo_a", "wo_b") if name in weights.tensors
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights."""
        return sum(weight.nbytes for weight in self._weights)

    def __call__(self, attention: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate back and project to `[tokens, hidden_size]`.

        Raises:
            DSV4Error: The host kept the output projection's weights to itself.
        """
        if len(self._weights) != 2:
            raise DSV4Error(
                f"{self._layer.name} was asked for its output projection and was built without wo_a and wo_b;"
                " pass them with its weights, or project in the host."
            )
        projected: torch.Tensor = self._operations.o_proj(
            attention, positions, self._rope, *self._weights, self._layer.num_groups
        )
        return projected
