"""The attention layers of a checkpoint, one after the other, with caches and steps of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from dsv4core.api.errors import CacheError, ConfigError
from dsv4core.api.layer import LayerScales, LayerSpec
from dsv4core.api.step import Step
from dsv4core.attention import DeepseekV4Attention, Observe
from dsv4core.framework.binding import bind_kind, bind_layer
from dsv4core.framework.selection import Selection
from dsv4core.framework.wording import warn_once
from dsv4core.kvcache import check_caches
from dsv4core.kvcache.pools import CachePools
from dsv4core.model.checkpoint import Checkpoint
from dsv4core.model.shapes import layer_spec
from dsv4core.ops import rms_norm
from dsv4core.step import Batch, StepBuffers, check_lengths, leading_decodes

UNSCALED = (
    "{} caches{} have no scales, and 1 is taken: values above 448 are cut off, and those below 2^-6 lose "
    "bits. Measure scales with `dsv4 calibrate`, and give them with scales=FILE."
)


@dataclass(frozen=True, eq=False)
class StackedLayer:
    """A layer, the norm before it, and the scales of its caches."""

    attention: DeepseekV4Attention
    norm: torch.Tensor
    scales: LayerScales = LayerScales()

    @property
    def spec(self) -> LayerSpec:
        """The layer."""
        return self.attention.layer


def load_layer(
    selection: Selection,
    checkpoint: Checkpoint,
    index: int,
    device: torch.device,
    observe: Observe = nullcontext,
    rank: int = 0,
    scales: Mapping[int, LayerScales] = MappingProxyType({}),
) -> StackedLayer:
    """Load one layer's weights, this rank's share of them, and bind its backend.

    Args:
        selection: The backend and its plans.
        checkpoint: Where the weights are.
        index: Layer number.
        device: Where they go.
        observe: Wraps each operation.
        rank: Tensor-parallel rank.
        scales: Of layers for which the checkpoint has none, by index.

    Raises:
        ConfigError: There are scales for a layer that has some of its own.
        CheckpointError: Tensors are missing, misshapen or hold NaN.
        PluginError: The backend fails to build the layer.
    """
    ranks, positions = selection.request.tensor_parallel, selection.request.limits.max_model_len
    spec = layer_spec(checkpoint.shape, index, rank, ranks)
    weights = checkpoint.layer(index, rank, ranks, max_positions=positions, device=device)
    if index in scales:
        if weights.scales != LayerScales():
            raise ConfigError(f"The checkpoint has scales of its own for {spec.name}; leave out scales=.")
        weights = replace(weights, scales=scales[index])
    bound = bind_layer(selection, spec, weights, device)
    graph = selection.request.graph
    attention = DeepseekV4Attention(bound, weights, selection.layout, observe, graph)
    return StackedLayer(attention, checkpoint.attn_norm(index).to(device), weights.scales)


class AttentionStack:
    """Computes `x + attention(rms(x))` layer by layer. Not a model: there are no MLPs and no output head.

    Attributes:
        selection: The backend and its plans.
        layers: The layers in order.
        pools: Their caches.
        kinds: The hooks and states that layers of a kind share, by the kind's name.
    """

    def __init__(
        self,
        selection: Selection,
        layers: Sequence[StackedLayer],
        device: torch.device,
        pools: CachePools | None = None,
    ) -> None:
        """Allocate step buffers for the selection's limits, and caches where none are given.

        Raises:
            CacheError: A pool does not fit the selection's formats.
        """
        request = selection.request
        specs = [layer.spec for layer in layers]
        kinds = tuple(dict.fromkeys(spec.kind for spec in specs))
        self.selection, self.layers = selection, tuple(layers)
        self.pools = pools or CachePools(
            specs,
            selection.layout,
            request.page_sizes,
            request.limits,
            device,
            request.decode_query_len,
            scales={layer.spec.index: layer.scales.kv for layer in layers},
        )
        unscaled = [own.spec.name for own in layers if own.scales.kv == 1]
        if selection.layout.window.scale == "tensor" and unscaled:
            which = "" if len(unscaled) == len(layers) else f" of {', '.join(unscaled)}"
            warn_once(UNSCALED.format(selection.layout.window.name, which))
        for own in layers:
            check_caches(self.pools.layers[own.spec.index], own.spec, selection.layout, own.scales.kv)
        self._longest = [0] * request.limits.max_requests
        self.kinds = {kind.name: bind_kind(selection, kind, device) for kind in kinds}
        self._buffers = StepBuffers(
            kinds,
            request.limits,
            request.page_sizes,
            self.pools.tables.num_pages(),
            device,
            request.decode_query_len,
        )

    def plan(self, computed: Sequence[int], query: Sequence[int]) -> Step:
        """Begin a step of requests `0 … n - 1`: give them pages, make the step, let the backend plan it.

        Args:
            computed: Tokens of each request whose keys are cached already.
            query: Query tokens of each request in this step.

        Raises:
            CacheError: A limit or the pools are exceeded, or a request goes back by more than its rejected
                drafts.
        """
        request, tables = self.selection.request, self.pools.tables
        check_lengths(computed, query, request.limits)
        for row, (known, new) in enumerate(zip(computed, query, strict=True)):
            if 0 < known < self._longest[row] - request.decode_query_len:
                raise CacheError(
                    f"request {row} goes back from {self._longest[row]} tokens to {known}, and its rings "
                    f"keep enough for {request.decode_query_len} rejected tokens; raise decode_query_len or "
                    "begin at 0."
                )
            tables.grow(row, known + new)
            self._longest[row] = known + new
        step = self._buffers.build(
            Batch(
                computed=tuple(computed),
                query=tuple(query),
                num_decode_requests=leading_decodes(tuple(computed), tuple(query), request.decode_query_len),
                window=tables.window.block_table[: len(query)],
                context=tables.context.block_table[: len(query)],
                state={name: table.block_table[: len(query)] for name, table in tables.state.items()},
            )
        )
        if not request.host_lengths:
            step = replace(step, host_lengths=None)
        for kind in self.kinds.values():
            kind.prepare_step(step)
            kind.plan_step(step)
        return step

    def warm_up(self) -> None:
        """Compute one token and forget it, so that what happens only once is not measured.

        The rows that it leaves in the caches are never read: no request has them.
        """
        weight = self.layers[0].norm
        dtype = getattr(torch, self.selection.request.dtype)
        self.forward(torch.zeros(1, weight.shape[0], dtype=dtype, device=weight.device), self.plan([0], [1]))
        self.release(0)

    def release(self, request: int) -> None:
        """Forget a request and take back its pages."""
        self.pools.tables.release(request)
        self._longest[request] = 0

    def kind_state(self, layer: StackedLayer) -> Any:
        """What the backend shares between all layers of this layer's kind within a step."""
        return self.kinds[layer.spec.kind.name].state

    def normalise(self, layer: StackedLayer, x: torch.Tensor) -> torch.Tensor:
        """A layer's input from the residual stream `[tokens, hidden_size]`."""
        return rms_norm(x, layer.norm, layer.spec.model.rms_norm_eps)

    def attend(
        self, layer: StackedLayer, hidden: torch.Tensor, step: Step, selected: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One layer's attention; arguments and results as `DeepseekV4Attention.forward`."""
        if hidden.shape != (step.num_tokens, layer.spec.model.hidden_size):
            raise CacheError(
                f"{layer.spec.name} was given hidden states {list(hidden.shape)}, and the step has "
                f"{step.num_tokens} tokens of {layer.spec.model.hidden_size}; pass one row a token."
            )
        caches = self.pools.layers[layer.spec.index]
        return layer.attention.forward(hidden, step, caches, self.kind_state(layer), selected)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """All layers: the residual stream `[tokens, hidden_size]` after the last one."""
        for layer in self.layers:
            x = x + self.attend(layer, self.normalise(layer, x), step)[0]
        return x
