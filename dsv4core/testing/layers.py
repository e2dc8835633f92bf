"""Layers at the layer seam: a backend's, and the reference's with the same weights, formats and inputs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from dsv4core.api import LayerCaches, LayerScales, LayerWeights, ModelShape, Request, Weight
from dsv4core.attention import DeepseekV4Attention
from dsv4core.framework.binding import bind_layer
from dsv4core.framework.selection import Selection, select
from dsv4core.kvcache.pools import CachePools
from dsv4core.model.random_checkpoint import random_layer
from dsv4core.model.rope import rope_table
from dsv4core.model.shapes import layer_spec
from dsv4core.stack import AttentionStack, StackedLayer
from dsv4core.testing.case import Case
from dsv4core.testing.subject import Subject


def backend_stack(subject: Subject, case: Case) -> AttentionStack:
    """The layers of a case with random weights, on the backend, their caches full of the case's poison.

    Raises:
        Refused: It cannot run them.
    """
    case = case.settled(subject)
    selection = subject.select(case.request(subject, "layer"))
    count, device = len(case.model.layer_kinds), subject.device
    layers = [_layer(selection, index, device, case.scales) for index in range(count)]
    pools = CachePools(
        [layer.spec for layer in layers],
        selection.layout,
        case.page_sizes,
        case.limits,
        device,
        case.decode_query_len,
        case.spare_pages,
        case.pool,
    )
    return AttentionStack(selection, layers, device, pools)


def reference_stack(stack: AttentionStack) -> AttentionStack:
    """The same layers on the reference, with caches of the same formats."""
    selection = stack.selection
    layout = selection.layout
    request = replace(
        selection.request,
        kv_cache_dtype=layout.window.name,
        index_dtype=layout.index.name.removeprefix("index_"),
        graph=False,
        deterministic=False,
        strided_pages=False,
    )
    chosen, device = select(request, "reference"), stack.layers[0].norm.device
    layers = [_reference_layer(request, own.spec.index, device, own.scales) for own in stack.layers]
    return AttentionStack(chosen, layers, device)


def caches_of(stack: AttentionStack) -> LayerCaches:
    """The caches of a stack's first layer."""
    return stack.pools.layers[stack.layers[0].spec.index]


def hidden_states(tokens: int, stack: AttentionStack, seed: int = 0) -> torch.Tensor:
    """Random inputs `[tokens, hidden_size]` in the activation dtype."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, stack.selection.request.model.hidden_size, generator=random)
    return values.to(stack.layers[0].norm.device, getattr(torch, stack.selection.request.dtype))


@lru_cache(maxsize=8)
def _reference_layer(request: Request, index: int, device: torch.device, scales: LayerScales) -> StackedLayer:
    """Layers have no state of their own, so all stacks of one request share them."""
    return _layer(select(request, "reference"), index, device, scales)


def _layer(selection: Selection, index: int, device: torch.device, scales: LayerScales) -> StackedLayer:
    request = selection.request
    model = request.model
    spec = layer_spec(model, index)
    table = rope_table(model.rope_of(spec.kind), model.qk_rope_head_dim, request.limits.max_model_len, device)
    tensors = {name: _on(weight, device) for name, weight in weights_of(model, index).items()}
    norm = tensors.pop("attn_norm").data
    weights = LayerWeights(tensors, table, scales)
    bound = bind_layer(selection, spec, weights, device)
    attention = DeepseekV4Attention(bound, weights, selection.layout, graph=request.graph)
    return StackedLayer(attention, norm, scales)


@lru_cache(maxsize=16)
def weights_of(model: ModelShape, index: int) -> dict[str, Weight]:
    """A layer's random weights, whole and on the CPU; do not write to them."""
    return random_layer(model, index)


def _on(weight: Weight, device: torch.device) -> Weight:
    """A copy: a backend that writes to weights must not spoil those of others."""
    scale = None if weight.scale is None else weight.scale.to(device, copy=True)
    return Weight(weight.data.to(device, copy=True), scale, weight.block)
