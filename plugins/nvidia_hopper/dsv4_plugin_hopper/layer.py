"""What the backend keeps for a layer, and for a step of all layers of one kind."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_plugin_hopper import compiled
from dsv4_plugin_hopper.attend import KERNELS, KEYS, MOST_SLICES, THREADS, Pool, attend, kernel_name
from dsv4core import libraries
from dsv4core.api import (
    AttentionOutput,
    LayerCaches,
    LayerKind,
    LayerPlan,
    LayerSpec,
    LayerWeights,
    Request,
    Step,
)
from dsv4core.attention import core_operations
from dsv4core.ops.o_proj.prepared import OutputProjection


class SharedStep:
    """Tables of slots and their lengths, which each plan makes anew."""

    def __init__(self, request: Request, kind: LayerKind, plan: LayerPlan, device: torch.device) -> None:
        """Keep what does not change."""
        self.kind, self._request = kind, request
        self._operations = core_operations(plan)
        self._requests = torch.arange(request.limits.max_requests, dtype=torch.int32, device=device)
        self.window: torch.Tensor
        self.window_lengths: torch.Tensor
        self.entries: torch.Tensor | None = None
        self.entry_lengths: torch.Tensor | None = None

    def plan(self, step: Step) -> None:
        """The tables of one step."""
        seen, table = self._request.model.sliding_window, step.window
        place = (step.token_to_request, table.block_table, table.page_size)
        self.window = self._operations.window_slots(step.positions, *place, seen)
        width = self._most_entries(step)
        self.window_lengths, *entries = self._operations.query_lengths(
            step.positions, seen, self.kind.ratio, width
        )
        if not entries:
            return
        _, self.entry_lengths = entries
        if self.kind.select == "all":
            assert self.kind.ratio is not None
            table, known = step.compressed[self.kind.name], step.seq_lens // self.kind.ratio
            place = (self._requests[: step.num_requests], table.block_table, table.page_size)
            self.entries = self._operations.visible_slots(known, *place, width)

    def chosen(self, selected: torch.Tensor, step: Step) -> torch.Tensor:
        """Slots of the entries that one layer has chosen."""
        table = step.compressed[self.kind.name]
        place = (step.token_to_request, table.block_table, table.page_size)
        slots: torch.Tensor = self._operations.entry_slots(selected, *place)
        return slots

    def _most_entries(self, step: Step) -> int:
        """Entries that a query attends at most: of this step, where no graph has to last."""
        if self.kind.select == "top_k":
            return self._request.model.index_topk
        longest = step.limits.max_model_len
        if step.host_lengths is not None and not self._request.graph:
            longest = max(step.host_lengths.total, default=0)
        return -(-self.kind.visible_entries(longest) // KEYS) * KEYS


class Layer:
    """One layer's sinks and output projection."""

    def __init__(
        self, layer: LayerSpec, plan: LayerPlan, weights: LayerWeights, device: torch.device, f16: bool
    ) -> None:
        self.layer, self._f16 = layer, f16
        self._sinks = weights["attn_sink"].data.float().contiguous()
        self._projection = OutputProjection(
            layer, weights, core_operations(plan), deep_gemm=bool(plan.projection_dtype)
        )
        kernels = {kernel_name(name, f16) for name in KERNELS}
        compiled.load(kernels, device, range(1, MOST_SLICES + 1), THREADS)

    def forward_mqa(
        self,
        q: torch.Tensor,
        caches: LayerCaches,
        selected: torch.Tensor | None,
        step: Step,
        kind_state: SharedStep,
        want_lse: bool,
        apply_sink: bool,
    ) -> AttentionOutput:
        """Attend over the window and the selected entries, or all of them."""
        pools = [Pool(caches.window, kind_state.window, kind_state.window_lengths)]
        if caches.compressed is not None and kind_state.entry_lengths is not None:
            if selected is None:
                assert kind_state.entries is not None
                slots, owners = kind_state.entries, step.token_to_request
            else:
                slots, owners = kind_state.chosen(selected, step), None
            pools.append(Pool(caches.compressed, slots, kind_state.entry_lengths, owners))
        sinks = self._sinks if apply_sink else None
        out, lse = attend(q, pools, self.layer.model.softmax_scale, sinks, want_lse, self._f16)
        return AttentionOutput(out, lse)

    def o_proj(self, attention: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate back and project to `[tokens, hidden_size]`."""
        return self._projection(attention, positions)

    def describe(self) -> dict[str, Any]:
        """Kernels, versions of their libraries, and the bytes of the prepared weights."""
        names = ("cuda-bindings", *libraries.DEEP_GEMM, "torch")
        versions = {name: found for name in names if (found := libraries.installed(name))}
        own = {"o_proj": self._projection.product, "prepared_bytes": self._projection.nbytes}
        return {"kernel": compiled.SOURCE.name, **versions, **own}
