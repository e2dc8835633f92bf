"""The attention layer: projections, insert, compressor, indexer, attention, output projection.

A backend is bound once, when the layer is built. What it does not own is done by `dsv4core.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from dsv4core import ops
from dsv4core.api.errors import CheckpointError
from dsv4core.api.kvcache import KVCacheLayout, round_up
from dsv4core.api.layer import AttentionOutput, LayerCaches, LayerPlan, LayerWeights, Weight
from dsv4core.api.step import Step
from dsv4core.branches import side_by_side
from dsv4core.framework.binding import BoundLayer
from dsv4core.workspace import LOGITS

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
        kind, self._ops = self.layer.kind, core_operations(bound.plan)
        self._q_scale: torch.Tensor | None = None
        if bound.plan.q_dtype.startswith("float8") and weights.scales.q != 1:
            self._q_scale = torch.full((1,), weights.scales.q, device=weights.rope.device)
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
        self._from_x = _Products(self._ops, weights, from_x)
        self._from_latent = _Products(self._ops, weights, from_latent)

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
        q, chosen = self._before_attention(self.project(x), caches, step, kind_state, selected)
        return self.o_proj(self.attend(q, chosen, caches, step, kind_state), step), chosen

    def _before_attention(
        self,
        projected: Projected,
        caches: LayerCaches,
        step: Step,
        kind_state: Any,
        selected: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries, and entries to attend; the caches are written. Beside each other where the plan allows."""

        def choose() -> torch.Tensor | None:
            self._compress(projected.index_entry, "index", caches, step)
            return self.select(projected, caches, step, kind_state) if selected is None else selected

        branches: list[Callable[[], Any]] = [
            partial(self.insert_kv, projected, caches, step),
            partial(self._compress, projected.entry, "compressed", caches, step),
            choose,  # takes longest: it stays on the stream that attention follows on
        ]
        if self.bound.plan.branches:
            q, _, chosen = side_by_side(branches, projected.kv.device, step.num_tokens)
        else:
            q, _, chosen = (branch() for branch in branches)
        return q, chosen

    def project(self, x: torch.Tensor) -> Projected:
        """All products with the layer's input and with its query latent."""
        model, eps = self.layer.model, self.layer.model.rms_norm_eps
        with self._observe("project"):
            parts = self._from_x(x)
            latent, kv = (parts[name].to(x.dtype) for name in ("latent", "kv"))
            norms = self._vectors["q_norm"], self._vectors["kv_norm"]
            latent, kv = self._ops.latent_norms(latent, kv, *norms, eps)
            parts |= self._from_latent(latent)
            q = parts["q"].to(x.dtype).unflatten(-1, (-1, model.head_dim))
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
            q: torch.Tensor = self._ops.qk_norm_rope_insert(
                projected.q,
                projected.kv,
                step.positions,
                self.rope,
                caches.window,
                step.window.slot_mapping,
                self.layer.model.rms_norm_eps,
                self.bound.plan.padded_q_heads,
                getattr(torch, self.bound.plan.q_dtype),
                self._q_scale,
            )
            return q

    def compress(self, projected: Projected, caches: LayerCaches, step: Step) -> None:
        """Store compressor states and the entries that this step completes, the indexer's included."""
        self._compress(projected.entry, "compressed", caches, step)
        self._compress(projected.index_entry, "index", caches, step)

    def _compress(self, entry: torch.Tensor | None, target: str, caches: LayerCaches, step: Step) -> None:
        if entry is not None:
            with self._observe("compress"):
                self._compress_entry(entry, target, caches, step)

    def _compress_entry(self, entry: torch.Tensor, target: str, caches: LayerCaches, step: Step) -> None:
        if self.bound.compress is not None:
            self.bound.compress(entry, step.positions, caches, step, target)
            return
        main = target == "compressed"
        state, entries = (caches.state, caches.compressed) if main else (caches.index_state, caches.index)
        assert state is not None
        assert entries is not None
        prefix = "compressor" if main else "indexer.compressor"
        self._ops.compress(
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

    def select(
        self, projected: Projected, caches: LayerCaches, step: Step, kind_state: Any
    ) -> torch.Tensor | None:
        """The entries that each query attends, `[tokens, index_topk]`; None if it is all of them or none."""
        kind, k = self.layer.kind, self.layer.model.index_topk
        if kind.select != "top_k":
            return None
        with self._observe("indexer"):
            assert kind.ratio is not None
            visible, lengths = (step.positions + 1) // kind.ratio, step.host_lengths
            longest = step.limits.max_model_len  # a graph's scores are as wide in every step
            if lengths is not None and not self._graph:
                longest = max(lengths.total, default=0)
            width = round_up(kind.visible_entries(longest), 16)  # kernels are compiled for its divisors
            if kind.visible_entries(longest) <= k:  # all entries, whatever their scores
                chosen: torch.Tensor = self._ops.visible_entries(visible, k)
                return chosen
            return self._top_k(projected, visible, width, caches, step, kind_state)

    def _top_k(
        self,
        projected: Projected,
        visible: torch.Tensor,
        width: int,
        caches: LayerCaches,
        step: Step,
        kind_state: Any,
    ) -> torch.Tensor:
        """The best entries, for so many queries at a time that their scores have room."""
        dtype = self.layout.index.name.removeprefix("index_")
        q, weights = self._ops.index_query(
            projected.index_q, projected.index_weights, step.positions, self.rope, dtype
        )
        tile = max(1, LOGITS // width)
        chosen = []
        for begin in range(0, max(1, step.num_tokens), tile):
            rows = slice(begin, begin + tile)
            logits = self.scores(q[rows], weights[rows], visible[rows], rows, width, caches, step, kind_state)
            chosen.append(self.best(logits, visible[rows], step))
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def scores(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        visible: torch.Tensor,
        tokens: slice,
        width: int,
        caches: LayerCaches,
        step: Step,
        kind_state: Any,
    ) -> torch.Tensor:
        """Scores of entries for some of the step's queries; arguments as of `dsv4_index_logits`."""
        if self.bound.index_logits is not None:
            return self.bound.index_logits(q, weights, visible, tokens, width, caches, step, kind_state)
        table, requests = step.compressed[self.layer.kind.name], step.token_to_request[tokens]
        logits: torch.Tensor = self._ops.index_logits(
            q, weights, caches.index, table, requests, visible, width
        )
        return logits

    def best(self, logits: torch.Tensor, visible: torch.Tensor, step: Step) -> torch.Tensor:
        """The entries that these queries attend; arguments as of `dsv4_index_topk`."""
        if self.bound.index_topk is not None:
            return self.bound.index_topk(logits, visible, step)
        chosen: torch.Tensor = self._ops.index_topk(logits, visible, self.layer.model.index_topk)
        return chosen

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


def core_operations(plan: LayerPlan) -> ModuleType:
    """What the core does its operations with: the definitions, or their kernels."""
    return ops if plan.core_ops == "torch" else import_module(f"dsv4core.ops.{plan.core_ops}")


FP32 = ("entry", "index_entry")
"""Outputs that stay fp32: compressors add them up over many steps."""


class _Products:
    """Weights that multiply the same input, as few as can be: a decode step is bound by their number."""

    def __init__(
        self, operations: ModuleType, weights: LayerWeights, outputs: Mapping[str, Sequence[str]]
    ) -> None:
        """Stack the rows of weights of one form; those of one output lie side by side.

        Raises:
            CheckpointError: Weights of one output have different forms.
        """
        self._linear = operations.linear
        groups: dict[Any, dict[str, list[Weight]]] = {}
        for output, names in outputs.items():
            prepared = [operations.prepare_linear(weights[name]) for name in names]
            forms = {_form(weight) for weight in prepared}
            if len(forms) > 1:
                found = ", ".join(f"{list(own.data.shape)} {own.data.dtype}" for own in prepared)
                raise CheckpointError(
                    f"{' and '.join(names)} are {found}; store them in one dtype, 128 rows a block."
                )
            groups.setdefault(forms.pop(), {})[output] = prepared
        self._stacks = [_Stack.of(group) for group in groups.values()]

    def __call__(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The products by output, `[tokens, width]`."""
        products: dict[str, torch.Tensor] = {}
        for stack in self._stacks:
            dtype = torch.float32 if any(output in FP32 for output in stack.outputs) else x.dtype
            parts = self._linear(x, stack.weight, dtype).split(stack.widths, dim=-1)
            products |= zip(stack.outputs, parts, strict=True)
        return products


def _form(weight: Weight) -> tuple[Any, ...]:
    """What stacked weights have in common. One whose last block is not full is a stack of its own."""
    if weight.scale is None or weight.block is None:
        return (weight.data.dtype,)
    full = weight.data.shape[0] % weight.block[0] == 0
    return (weight.data.dtype, weight.block, None if full else id(weight))


@dataclass(frozen=True, eq=False)
class _Stack:
    """Weights as one, and the outputs that its rows give."""

    weight: Weight
    outputs: tuple[str, ...]
    widths: list[int]

    @classmethod
    def of(cls, group: Mapping[str, Sequence[Weight]]) -> _Stack:
        members = [weight for weights in group.values() for weight in weights]
        data = torch.cat([weight.data for weight in members])
        scales = [weight.scale for weight in members if weight.scale is not None]
        widths = [sum(weight.data.shape[0] for weight in weights) for weights in group.values()]
        stacked = Weight(data, torch.cat(scales) if scales else None, members[0].block)
        return cls(stacked, tuple(group), widths)
