"""What runs. Each operation is dsv4core's definition in plain torch until a kernel takes its place."""

from __future__ import annotations

import torch

from dsv4core import ops
from dsv4core.api import LayerCaches, LayerKind, LayerSpec, LayerWeights, Step


class StepTables:
    """Which cached rows each query reads; the layers of one kind share them within a step."""

    def __init__(self, kind: LayerKind, window: int) -> None:
        self.kind, self.window_tokens = kind, window

    def plan(self, step: Step) -> None:
        """Make the tables of a step: slots of the window and, where a kind attends all, of the entries."""
        self.step, window = step, step.window
        self.entries: torch.Tensor | None = None
        self.window = ops.window_slots(
            step.positions, step.token_to_request, window.block_table, window.page_size, self.window_tokens
        )
        if self.kind.select == "all" and self.kind.ratio is not None:
            visible = (step.positions + 1) // self.kind.ratio
            width = int(visible.max()) if visible.numel() else 0
            self.entries = self.slots(ops.visible_entries(visible, width))

    def slots(self, entries: torch.Tensor) -> torch.Tensor:
        """Slots `[tokens, k]` of request-local entries `[tokens, k]`; -1 stays -1."""
        table = self.step.compressed[self.kind.name]
        return ops.entry_slots(entries, self.step.token_to_request, table.block_table, table.page_size)


class Layer:
    """One layer's prepared weights."""

    def __init__(self, layer: LayerSpec, weights: LayerWeights) -> None:
        self.layer, self.rope = layer, weights.rope
        self.sinks = weights["attn_sink"].data.float()
        # At the kernel seam an engine may keep the output projection to itself.
        names = [name for name in ("wo_a", "wo_b") if name in weights.tensors]
        self.projections = [ops.prepare_linear(weights[name]) for name in names]

    @property
    def prepared_bytes(self) -> int:
        """Bytes of the weights that are kept besides the host's."""
        return sum(weight.nbytes for weight in self.projections)

    def attend(
        self,
        q: torch.Tensor,
        caches: LayerCaches,
        selected: torch.Tensor | None,
        tables: StepTables,
        want_lse: bool,
        apply_sink: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over the window and the entries; your kernel goes here."""
        pools = [(caches.window, tables.window)]
        entries = tables.entries if selected is None else tables.slots(selected)
        if caches.compressed is not None and entries is not None:
            pools.append((caches.compressed, entries))
        sinks = self.sinks if apply_sink else None
        return ops.sparse_mla(q, pools, self.layer.model.softmax_scale, sinks, want_lse)

    def project(self, attention: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The output projection of this rank's heads."""
        wo_a, wo_b = self.projections
        return ops.o_proj(attention, positions, self.rope, wo_a, wo_b, self.layer.num_groups)
