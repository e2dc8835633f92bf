"""The attention layer: projections, insert, compressor, indexer, attention, output projection.

A backend is bound once, when the layer is built. What it does not own is done by `dsv4core.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dsv4core import ops
from dsv4core.api.kvcache import KVCacheLayout
from dsv4core.api.layer import AttentionOutput, LayerCaches, LayerWeights, Weight
from dsv4core.api.step import Step
from dsv4core.framework.binding import BoundLayer

Observe = Callable[[str], AbstractContextManager[Any]]
"""Called with an operation's name around each operation; times it, or does nothing."""

OPERATIONS = ("project", "insert_kv", "compress", "indexer", "forward_mqa", "o_proj")


@dataclass(frozen=True, eq=False)
class Projected:
    """What a layer projects from its input; everything after it is the same in any chunking of a prompt.

    Attributes:
        q: `[tokens, num_heads, head_dim]`, not normalised.
        kv: `[tokens, head_dim]`, normalised, not rotated.
        entry: `[tokens, 2 * groups * head_dim]` fp32, values then scores; None without a compressor.
        index_entry: The same of the indexer's compressor; None without an indexer.
        index_q: `[tokens, index_n_heads, index_head_dim]`, not rotated; None without an indexer.
        index_weights: `[tokens, index_n_heads]`; None without an indexer.
    """

    q: torch.Tensor
    kv: torch.Tensor
    entry: torch.Tensor | None = None
    index_entry: torch.Tensor | None = None
    index_q: torch.Tensor | None = None
    index_weights: torch.Tensor | None = None


class DeepseekV4Attention:
    """One attention layer on one rank.

    `forward` is all of it. Its stages are public, for hosts that do some of them and for tests.
    """

    def __init__(
        self,
        bound: BoundLayer,
        weights: LayerWeights,
        layout: KVCacheLayout,
        observe: Observe = nullcontext,
        graph: bool = False,
    ) -> None:
        """Prepare the weights that the core multiplies with.

        Args:
            bound: The backend's functions for this layer.
            weights: The layer's weights; the backend's own were prepared when it was bound.
            layout: The formats of the layer's caches.
            observe: Wraps each operation.
            graph: Whether steps are captured: then what is computed may not depend on a step's lengths.
        """
        self.bound, self.layer, self.rope = bound, bound.spec, weights.rope
        self.layout, self._observe, self._graph = layout, observe, graph
        kind = self.layer.kind
        self._vectors = {
            name: weight.data for name, weight in weights.tensors.items() if name.endswith(("norm", ".ape"))
        }
        from_x = {"latent": ["wq_a"], "kv": ["wkv"]}
        from_latent = {"q": ["wq_b"]}
        if kind.ratio is not None:
            from_x["entry"] = ["compressor.wkv", "compressor.wgate"]
        if kind.select == "top_k":
            from_x["index_entry"] = ["indexer.compressor.wkv", "indexer.compressor.wgate"]
            from_x["index_weights"] = ["indexer.weights_proj"]
            from_latent["index_q"] = ["indexer.wq_b"]
        self._from_x, self._from_latent = _Products(weights, from_x), _Products(weights, from_latent)

    def forward(
        self,
        x: torch.Tensor,
        step: Step,
        caches: LayerCaches,
        kind_state: Any,
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend for every token of a step.

        Args:
            x: `[tokens, hidden_size]`, normalised hidden states.
            step: The step; the layer kind's `plan_step` has run for it.
            caches: This layer's caches.
            kind_state: What all layers of this kind share in a step.
            selected: `[tokens, index_topk]` int32 entries to attend, where another layer chose them; None
                chooses them here.

        Returns:
            `[tokens, hidden_size]` of `x.dtype`, this rank's partial sum over heads; and the entries that
            were attended, as `selected`, for layers that share them.
        """
        projected = self.project(x)
        q = self.insert_kv(projected, caches, step)
        self.compress(projected, caches, step)
        if selected is None:
            selected = self.select(projected, caches, step)
        return self.o_proj(self.attend(q, selected, caches, step, kind_state), step), selected

    def project(self, x: torch.Tensor) -> Projected:
        """All products with the layer's input and with its query latent."""
        model, eps = self.layer.model, self.layer.model.rms_norm_eps
        with self._observe("project"):
            parts = self._from_x(x)
            latent = ops.rms_norm(parts["latent"].to(x.dtype), self._vectors["q_norm"], eps)
            parts |= self._from_latent(latent)
            q = parts["q"].to(x.dtype).unflatten(-1, (-1, model.head_dim))
            kv = ops.rms_norm(parts["kv"].to(x.dtype), self._vectors["kv_norm"], eps)
            if "index_q" not in parts:
                return Projected(q, kv, parts.get("entry"))
            index_q = parts["index_q"].to(x.dtype).unflatten(-1, (-1, model.index_head_dim))
            index_weights = parts["index_weights"].to(x.dtype)
            return Projected(q, kv, parts["entry"], parts["index_entry"], index_q, index_weights)

    def insert_kv(self, projected: Projected, caches: LayerCaches, step: Step) -> torch.Tensor:
        """Normalise and rotate q, store the keys; q as the backend's `forward_mqa` takes it."""
        with self._observe("insert_kv"):
            if self.bound.insert_kv is not None:
                return self.bound.insert_kv(projected.q, projected.kv, step.positions, caches, step)
            return ops.qk_norm_rope_insert(
                projected.q,
                projected.kv,
                step.positions,
                self.rope,
                caches.window,
                step.window.slot_mapping,
                self.layer.model.rms_norm_eps,
                self.bound.plan.padded_q_heads,
                getattr(torch, self.bound.plan.q_dtype),
            )

    def compress(self, projected: Projected, caches: LayerCaches, step: Step) -> None:
        """Store compressor states and the entries that this step completes, the indexer's included."""
        with self._observe("compress"):
            if projected.entry is not None:
                self._compress(projected.entry, "compressed", caches, step)
            if projected.index_entry is not None:
                self._compress(projected.index_entry, "index", caches, step)

    def _compress(self, entry: torch.Tensor, target: str, caches: LayerCaches, step: Step) -> None:
        if self.bound.compress is not None:
            self.bound.compress(entry, step.positions, caches, step, target)
            return
        main = target == "compressed"
        state, entries = (caches.state, caches.compressed) if main else (caches.index_state, caches.index)
        assert state is not None
        assert entries is not None
        prefix = "compressor" if main else "indexer.compressor"
        ops.compress(
            entry,
            self._vectors[f"{prefix}.ape"],
            self._vectors[f"{prefix}.norm"],
            self.rope,
            self.layer.model.rms_norm_eps,
            self.layer.kind,
            step,
            state,
            entries,
        )

    def select(self, projected: Projected, caches: LayerCaches, step: Step) -> torch.Tensor | None:
        """The entries that each query attends, `[tokens, index_topk]`; None if it is all of them or none."""
        kind, k = self.layer.kind, self.layer.model.index_topk
        if kind.select != "top_k":
            return None
        with self._observe("indexer"):
            assert kind.ratio is not None
            visible, lengths = (step.positions + 1) // kind.ratio, step.host_lengths
            short = lengths is not None and kind.visible_entries(max(lengths.total, default=0)) <= k
            if short and not self._graph:
                return ops.visible_entries(visible, k)
            return self._top_k(projected, visible, caches, step)

    def _top_k(
        self, projected: Projected, visible: torch.Tensor, caches: LayerCaches, step: Step
    ) -> torch.Tensor:
        assert projected.index_q is not None
        assert projected.index_weights is not None
        assert caches.index is not None
        bound, k = self.bound, self.layer.model.index_topk
        dtype = self.layout.index.name.removeprefix("index_")
        q, weights = ops.index_query(
            projected.index_q, projected.index_weights, step.positions, self.rope, dtype
        )
        rows = (caches.index, step.compressed[self.layer.kind.name], step.token_to_request, visible)
        if bound.index_logits is None and bound.index_topk is None:
            return ops.select_entries(q, weights, *rows, k)
        if bound.index_logits is not None:
            logits = bound.index_logits(q, weights, caches, step)
        else:
            logits = ops.index_logits(q, weights, *rows)
            if self._graph:  # as wide in every step
                width = self.layer.kind.visible_entries(step.limits.max_model_len)
                logits = torch.nn.functional.pad(logits, (0, width - logits.shape[1]), value=float("-inf"))
        return ops.index_topk(logits, k) if bound.index_topk is None else bound.index_topk(logits, step)

    def attend(
        self,
        q: torch.Tensor,
        selected: torch.Tensor | None,
        caches: LayerCaches,
        step: Step,
        kind_state: Any,
    ) -> AttentionOutput:
        """The backend's attention over window and entries, sink included."""
        with self._observe("forward_mqa"):
            return self.bound.forward_mqa(
                q, caches, selected, step.positions, step, kind_state, None, False, True
            )

    def o_proj(self, attention: AttentionOutput, step: Step) -> torch.Tensor:
        """The backend's output projection."""
        with self._observe("o_proj"):
            return self.bound.o_proj(attention, step.positions)


class _Products:
    """Weights that multiply the same input, as one: a decode step is bound by the number of products."""

    def __init__(self, weights: LayerWeights, outputs: Mapping[str, Sequence[str]]) -> None:
        """Stack the rows of the named weights; those of one output lie side by side."""
        rows = {
            output: torch.cat([ops.prepare_linear(weights[name]).data for name in names])
            for output, names in outputs.items()
        }
        self._widths = [weight.shape[0] for weight in rows.values()]
        self._outputs, self._weight = tuple(rows), Weight(torch.cat(list(rows.values())))

    def __call__(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The products by output, `[tokens, width]` fp32."""
        products = ops.linear(x, self._weight, torch.float32).split(self._widths, dim=-1)
        return dict(zip(self._outputs, products, strict=True))
