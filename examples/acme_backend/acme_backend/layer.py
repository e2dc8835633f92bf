"""A step's tables, a layer's prepared weights, and the calls of the kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from acme_backend import kernels
from dsv4core import ops
from dsv4core.api import AttentionOutput, LayerCaches, LayerKind, LayerPlan, LayerSpec, LayerWeights, Step


class StepTables:
    """Which cached rows each query reads; the layers of one kind share them within a step."""

    def __init__(self, kind: LayerKind, window_tokens: int) -> None:
        self.kind, self.window_tokens = kind, window_tokens

    def plan(self, step: Step) -> None:
        """Make the tables: slots of the window and, where a kind attends all, of the entries."""
        self.step, window = step, step.window
        self.window = ops.window_slots(
            step.positions, step.token_to_request, window.block_table, window.page_size, self.window_tokens
        )
        self.entries: torch.Tensor | None = None
        if self.kind.select == "all" and self.kind.ratio is not None:
            visible = (step.positions + 1) // self.kind.ratio
            width = int(visible.max()) if visible.numel() else 0
            self.entries = self.slots(ops.visible_entries(visible, width))

    def slots(self, entries: torch.Tensor) -> torch.Tensor:
        """Slots `[tokens, k]` of request-local entries `[tokens, k]`; -1 stays -1."""
        table = self.step.compressed[self.kind.name]
        return ops.entry_slots(entries, self.step.token_to_request, table.block_table, table.page_size)


@dataclass(frozen=True)
class Rotated:
    """This backend's own form of an attention output.

    Attributes:
        grouped: `[tokens, groups, heads a group * head_dim]`, rotated back.
    """

    grouped: torch.Tensor


class Layer:
    """One layer's prepared weights."""

    def __init__(self, layer: LayerSpec, plan: LayerPlan, weights: LayerWeights, tile: int) -> None:
        self.layer, self.plan, self.rope, self.tile = layer, plan, weights.rope, tile
        padding = plan.padded_q_heads - layer.num_heads
        sinks = weights["attn_sink"].data.float()
        self.sinks = torch.nn.functional.pad(sinks, (0, padding), value=kernels.NOTHING)
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
        positions: torch.Tensor,
        tables: StepTables,
        want_lse: bool,
        apply_sink: bool,
    ) -> AttentionOutput:
        """Attention over the window and the entries."""
        pools = [(caches.window, tables.window)]
        entries = tables.entries if selected is None else tables.slots(selected)
        if caches.compressed is not None and entries is not None:
            pools.append((caches.compressed, entries))
        sinks = self.sinks if apply_sink else torch.full_like(self.sinks, kernels.NOTHING)
        out, lse = kernels.attend(q, pools, self.layer.model.softmax_scale, sinks, self.tile)
        data = self._rotated(out, positions) if self.plan.output.format == "private" else out
        return AttentionOutput(data, lse[:, : self.layer.num_heads] if want_lse else None)

    def project(self, attention: torch.Tensor | Rotated, positions: torch.Tensor) -> torch.Tensor:
        """The output projection of this rank's heads."""
        rotated = attention if isinstance(attention, Rotated) else self._rotated(attention, positions)
        wo_a, wo_b = self.projections
        weight = wo_a.data.unflatten(0, (self.layer.num_groups, -1))
        low_rank = torch.einsum("tgd,grd->tgr", rotated.grouped.float(), weight)
        return ops.linear(low_rank.flatten(1).to(rotated.grouped.dtype), wo_b)

    def _rotated(self, out: torch.Tensor, positions: torch.Tensor) -> Rotated:
        """Rotate the last channels back, in pairs of neighbours, and drop the padded heads."""
        heads = out[:, : self.layer.num_heads].float()
        width = self.rope.shape[1]
        cos, sin = self.rope[positions][:, None].chunk(2, dim=-1)
        even, odd = heads[..., -width::2], heads[..., -width + 1 :: 2]
        turned = torch.stack([even * cos + odd * sin, odd * cos - even * sin], dim=-1).flatten(-2)
        rotated = torch.cat([heads[..., :-width], turned], dim=-1).to(out.dtype)
        return Rotated(rotated.flatten(1).unflatten(1, (self.layer.num_groups, -1)))
