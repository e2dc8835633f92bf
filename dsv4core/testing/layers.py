"""Layers at the layer seam: a backend's, and the reference's with the same weights, formats and inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache

import torch

from dsv4core.api import LayerKind, LayerWeights, Limits, ModelShape, PageSizes, Request, Weight
from dsv4core.attention import DeepseekV4Attention
from dsv4core.framework.binding import bind_layer
from dsv4core.framework.selection import Selection, select
from dsv4core.model.random_checkpoint import random_layer
from dsv4core.model.rope import rope_table
from dsv4core.model.shapes import layer_spec
from dsv4core.stack import AttentionStack, StackedLayer
from dsv4core.testing.subject import MODEL, Subject

LAYER_MODEL = replace(MODEL, index_topk=128)
"""One layer of each kind; 128 of the entries are chosen, so that 600 tokens make the indexer choose."""


def backend_stack(
    subject: Subject,
    kinds: Iterable[LayerKind],
    limits: Limits,
    kv_cache_dtype: str = "auto",
    decode_query_len: int = 1,
    heads: int = 64,
    page_sizes: PageSizes = PageSizes(),
) -> AttentionStack:
    """Layers of these kinds with random weights, on the backend.

    Raises:
        Refused: It cannot run them.
    """
    groups = math.gcd(heads, LAYER_MODEL.o_groups)
    request = subject.request(
        replace(LAYER_MODEL, num_attention_heads=heads, o_groups=groups),
        limits=limits,
        kv_cache_dtype=kv_cache_dtype,
        decode_query_len=decode_query_len,
        page_sizes=page_sizes,
        private_output=True,
        host_lengths=True,
    )
    selection = subject.select(request)
    layers = [_layer(selection, LAYER_MODEL.layer_kinds.index(kind), subject.device) for kind in kinds]
    return AttentionStack(selection, layers, subject.device)


def reference_stack(stack: AttentionStack) -> AttentionStack:
    """The same layers on the reference, with caches of the same formats."""
    selection = stack.selection
    layout = selection.layout
    request = replace(
        selection.request,
        kv_cache_dtype=layout.window.name,
        index_dtype=layout.index.name.removeprefix("index_"),
    )
    chosen, device = select(request, "reference"), stack.layers[0].norm.device
    layers = [_reference_layer(request, layer.spec.index, device) for layer in stack.layers]
    return AttentionStack(chosen, layers, device)


def hidden_states(tokens: int, stack: AttentionStack, seed: int = 0) -> torch.Tensor:
    """Random inputs `[tokens, hidden_size]` in the activation dtype."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, LAYER_MODEL.hidden_size, generator=random)
    return values.to(stack.layers[0].norm.device, getattr(torch, stack.selection.request.dtype))


@lru_cache(maxsize=8)
def _reference_layer(request: Request, index: int, device: torch.device) -> StackedLayer:
    """Layers have no state of their own, so all stacks of one request share them."""
    return _layer(select(request, "reference"), index, device)


def _layer(selection: Selection, index: int, device: torch.device) -> StackedLayer:
    model = selection.request.model
    spec = layer_spec(model, index)
    positions = selection.request.limits.max_model_len
    table = rope_table(model.rope_of(spec.kind), model.qk_rope_head_dim, positions, device)
    tensors = {name: _on(weight, device) for name, weight in _weights(model, index).items()}
    norm = tensors.pop("attn_norm").data
    weights = LayerWeights(tensors, table)
    bound = bind_layer(selection, spec, weights, device)
    return StackedLayer(DeepseekV4Attention(bound, weights, selection.layout), norm)


@cache
def _weights(model: ModelShape, index: int) -> dict[str, Weight]:
    return random_layer(model, index)


def _on(weight: Weight, device: torch.device) -> Weight:
    """A copy: a backend that writes to weights must not spoil those of others."""
    scale = None if weight.scale is None else weight.scale.to(device, copy=True)
    return Weight(weight.data.to(device, copy=True), scale, weight.block)
