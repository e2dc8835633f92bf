"""The compressors of one layer: vectors prepared once, entries by CuTe DSL, the indexer's by the core."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal

import torch

from dsv4core.api import LayerCaches, LayerSpec, LayerWeights, Step


class Compressors:
    """Of attended entries, and of the indexer's keys where a layer has them."""

    def __init__(
        self, layer: LayerSpec, weights: LayerWeights, operations: ModuleType, device: torch.device
    ) -> None:
        """Bring the vectors into fp32; kernels are compiled when they are first called, before any capture.

        Args:
            layer: The layer.
            weights: Its weights.
            operations: The core's kernels.
            device: Where.
        """
        from dsv4_plugin_flashinfer.compress import cute

        self._layer, self._rope = layer, weights.rope
        self._cute, self._core = cute.compress, operations.compress
        self._vectors: dict[str, Any] = {
            target: tuple(
                weights[f"{prefix}.{name}"].data.float().contiguous().to(device) for name in ("ape", "norm")
            )
            for target, prefix in (("compressed", "compressor"), ("index", "indexer.compressor"))
            if f"{prefix}.ape" in weights.tensors
        }

    def __call__(
        self,
        projected: torch.Tensor,
        caches: LayerCaches,
        step: Step,
        target: Literal["compressed", "index"],
    ) -> None:
        """Entries that the step completes, and its states."""
        main = target == "compressed"
        state, entries = (caches.state, caches.compressed) if main else (caches.index_state, caches.index)
        assert state is not None
        assert entries is not None
        operation: Any = self._cute if main else self._core
        eps = self._layer.model.rms_norm_eps
        operation(projected, *self._vectors[target], self._rope, eps, self._layer.kind, step, state, entries)
