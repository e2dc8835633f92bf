"""What the Triton backend keeps for a layer, and for a step of all layers of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton

from dsv4core.api.kvcache import KVCacheLayout, round_up
from dsv4core.api.layer import AttentionOutput, LayerCaches, LayerSpec, LayerWeights
from dsv4core.api.model import LayerKind
from dsv4core.api.selection import Request
from dsv4core.api.step import Step
from dsv4core.backends.triton_gather import Chunk, gather_chunks
from dsv4core.ops import triton as kernels
from dsv4core.ops.o_proj.prepared import OutputProjection
from dsv4core.ops.sparse_mla import Rows
from dsv4core.ops.sparse_mla.schedule_triton import Schedule, Table, schedule
from dsv4core.ops.sparse_mla.triton import attend, results


class TritonStep:
    """What all layers of one kind share within a step: index tables, and how attention is divided.

    Each plan makes them anew: a graph that replays attention has to replay the plan as well.
    """

    def __init__(
        self, kind: LayerKind, request: Request, layout: KVCacheLayout, gathers: bool, device: torch.device
    ) -> None:
        """Keep what does not change.

        Args:
            kind: The layers' kind.
            request: What was selected for.
            layout: The formats of the caches.
            gathers: Whether rows of prefills are gathered.
            device: Where.
        """
        self.kind, self._request, self._device = kind, request, device
        pools = (layout.window,) if kind.ratio is None else (layout.window, layout.compressed)
        self._formats = {(own.name, own.fp8) for own in pools}
        self._gathers = gathers
        self._requests = torch.arange(request.limits.max_requests, dtype=torch.int32, device=device)
        self.window: torch.Tensor
        self.visible: torch.Tensor | None = None
        self.entries: tuple[torch.Tensor, torch.Tensor] | None = None
        self.division: Schedule
        self.chunks: Sequence[Chunk] = ()

    def plan(self, step: Step) -> None:
        """Make the tables of queries that read rows in place: all, or decodes where prefills are gathered."""
        self.chunks = tuple(gather_chunks(step, self.kind, self._request)) if self._gathers else ()
        tokens = slice(step.num_decode_tokens if self.chunks else step.num_tokens)
        positions, requests, table = step.positions[tokens], step.token_to_request[tokens], step.window
        self.window = kernels.window_slots(
            positions, requests, table.block_table, table.page_size, self._request.model.sliding_window
        )
        tables: list[Table] = [(self.window.shape[1], None)]
        if self.kind.ratio is not None:
            self.visible = (positions + 1) // self.kind.ratio
        if self.kind.select == "top_k":
            tables.append((self._request.model.index_topk, self.visible))
        elif self.kind.select == "all":
            assert self.kind.ratio is not None
            table = step.compressed[self.kind.name]
            slots = kernels.visible_slots(
                step.seq_lens // self.kind.ratio,
                self._requests[: step.num_requests],
                table.block_table,
                table.page_size,
                self._entries(step),
            )
            self.entries = slots, requests
            tables.append((slots.shape[1], self.visible))
        how = self._formats, getattr(torch, self._request.dtype), self._device
        self.division = schedule(len(positions), self._request.num_heads, tables, *how)

    def _entries(self, step: Step) -> int:
        """Columns for all entries: the step's where its lengths are known, and no graph has to last."""
        longest = step.limits.max_model_len
        if step.host_lengths is not None and not self._request.graph:
            longest = max(step.host_lengths.total, default=0)
        return round_up(self.kind.visible_entries(longest), 16)  # kernels are compiled for its divisors


class TritonLayer:
    """One layer's prepared weights."""

    def __init__(self, layer: LayerSpec, weights: LayerWeights) -> None:
        self.layer, self.rope = layer, weights.rope
        self.sinks = weights["attn_sink"].data.float()
        self._projection = OutputProjection(layer, weights, kernels)
        self._compressors = {
            target: (weights[f"{prefix}.ape"].data.float(), weights[f"{prefix}.norm"].data)
            for target, prefix in (("compressed", "compressor"), ("index", "indexer.compressor"))
            if f"{prefix}.ape" in weights.tensors
        }

    def insert_kv(
        self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, caches: LayerCaches, step: Step
    ) -> torch.Tensor:
        """Queries normalised and rotated, keys stored."""
        slots, eps = step.window.slot_mapping, self.layer.model.rms_norm_eps
        return kernels.qk_norm_rope_insert(q, kv, positions, self.rope, caches.window, slots, eps)

    def compress(
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
        eps, kind = self.layer.model.rms_norm_eps, self.layer.kind
        kernels.compress(projected, *self._compressors[target], self.rope, eps, kind, step, state, entries)

    def index_logits(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        visible: torch.Tensor,
        tokens: slice,
        width: int,
        caches: LayerCaches,
        step: Step,
    ) -> torch.Tensor:
        """Scores of the entries that these tokens see."""
        assert caches.index is not None
        table, requests = step.compressed[self.layer.kind.name], step.token_to_request[tokens]
        return kernels.index_logits(q, weights, caches.index, table, requests, visible, width)

    def index_topk(self, logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """The best of them."""
        return kernels.index_topk(logits, visible, self.layer.model.index_topk)

    def forward_mqa(
        self,
        q: torch.Tensor,
        caches: LayerCaches,
        selected: torch.Tensor | None,
        step: Step,
        kind_state: TritonStep,
        want_lse: bool,
        apply_sink: bool,
    ) -> AttentionOutput:
        """Attend over the window and the selected entries, or all of them."""
        (out, lse), front = results(q, want_lse), slice(kind_state.division.tokens)
        if kind_state.chunks:  # rows of padding are in no chunk
            out[kind_state.chunks[-1].tokens.stop :] = 0
        pools = [Rows(caches.window, kind_state.window)]
        if caches.compressed is not None and selected is not None:
            table, requests = step.compressed[self.layer.kind.name], step.token_to_request[front]
            slots = kernels.entry_slots(selected[front], requests, table.block_table, table.page_size)
            pools.append(Rows(caches.compressed, slots, kind_state.visible))
        elif caches.compressed is not None and kind_state.entries is not None:
            slots, requests = kind_state.entries
            pools.append(Rows(caches.compressed, slots, kind_state.visible, requests))

        def attended(tokens: slice, pools: Sequence[Rows], division: Schedule) -> None:
            sinks, part = self.sinks if apply_sink else None, None if lse is None else lse[tokens]
            attend(q[tokens], pools, self.layer.model.softmax_scale, sinks, out[tokens], part, division)

        attended(front, pools, kind_state.division)
        for chunk in kind_state.chunks:  # which has its workspaces for the time of its call
            attended(chunk.tokens, chunk.rows(caches, selected, self.layer.model, q.dtype), chunk.division)
        return AttentionOutput(out, lse)

    def o_proj(self, attention: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate back and project to `[tokens, hidden_size]`."""
        return self._projection(attention, positions)

    def describe(self) -> dict[str, Any]:
        """Kernel, versions of Triton and torch, and the bytes of the prepared weights."""
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        return {"kernel": "triton", **versions, "prepared_bytes": self._projection.nbytes}
