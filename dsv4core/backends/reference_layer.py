"""What the reference backend keeps for a layer, and for a step of all layers of one kind."""

from __future__ import annotations

from typing import Any

import torch

from dsv4core import ops
from dsv4core.api.layer import AttentionOutput, LayerCaches, LayerSpec, LayerWeights
from dsv4core.api.model import LayerKind
from dsv4core.api.step import Step
from dsv4core.ops.o_proj.prepared import OutputProjection


class ReferenceStep:
    """Index tables that all layers of one kind share within a step."""

    def __init__(self, kind: LayerKind, window: int) -> None:
        self.kind, self._window = kind, window
        self.window: torch.Tensor
        self.entries: torch.Tensor | None = None

    def plan(self, step: Step) -> None:
        """Make the window's table, and that of all visible entries where the kind attends all."""
        self._step, table = step, step.window
        self.window = ops.window_slots(
            step.positions, step.token_to_request, table.block_table, table.page_size, self._window
        )
        if self.kind.select == "all":
            self.entries = self._all_entries(step)

    def _all_entries(self, step: Step) -> torch.Tensor:
        """Slots of every entry that a query sees `[tokens, most]`: a request's slots, cut for each query."""
        assert self.kind.ratio is not None
        visible = (step.positions + 1) // self.kind.ratio
        width = int(visible.max()) if visible.numel() else 0
        entry = torch.arange(width, dtype=torch.int32, device=visible.device)
        requests, table = (
            torch.arange(step.num_requests, device=visible.device),
            step.compressed[self.kind.name],
        )
        slots = ops.entry_slots(
            entry.expand(step.num_requests, -1), requests, table.block_table, table.page_size
        )
        return slots[step.token_to_request].masked_fill_(entry >= visible[:, None], -1)

    def slots(self, entries: torch.Tensor) -> torch.Tensor:
        """Slots of request-local entries `[tokens, k]` in this kind's compressed pools."""
        table = self._step.compressed[self.kind.name]
        return ops.entry_slots(entries, self._step.token_to_request, table.block_table, table.page_size)


class ReferenceLayer:
    """One layer's prepared weights."""

    def __init__(self, layer: LayerSpec, weights: LayerWeights) -> None:
        self.layer, self.rope = layer, weights.rope
        self.sinks = weights["attn_sink"].data.float()
        self._projection = OutputProjection(layer, weights, ops)

    def forward_mqa(
        self,
        q: torch.Tensor,
        caches: LayerCaches,
        selected: torch.Tensor | None,
        step: Step,
        kind_state: ReferenceStep,
        want_lse: bool,
        apply_sink: bool,
    ) -> AttentionOutput:
        """Attend over the window and the selected entries, or all of them."""
        model = self.layer.model
        pools = [(caches.window, kind_state.window)]
        entries = kind_state.entries if selected is None else kind_state.slots(selected)
        if caches.compressed is not None and entries is not None:
            pools.append((caches.compressed, entries))
        sinks = self.sinks if apply_sink else None
        return AttentionOutput(*ops.sparse_mla(q, pools, model.softmax_scale, sinks, want_lse))

    def o_proj(self, attention: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate back and project to `[tokens, hidden_size]`."""
        return self._projection(attention, positions)

    def describe(self) -> dict[str, Any]:
        """Kernel and torch version, and the bytes of the prepared weights."""
        return {"kernel": "torch", "torch": torch.__version__, "prepared_bytes": self._projection.nbytes}
