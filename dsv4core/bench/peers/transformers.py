"""transformers' eager attention layer: all of it, on wide weights and a cache of its own."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4core.api import LayerSpec, LayerWeights
from dsv4core.bench.gaps import Unmeasurable
from dsv4core.bench.inputs import Inputs
from dsv4core.bench.operations import Measured
from dsv4core.bench.timing import Call
from dsv4core.kvcache import cache_layout
from dsv4core.model.blocks import dequantize_block
from dsv4core.model.names import LAYER_TENSORS
from dsv4core.model.shapes import to_config


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer.

    Attributes:
        config: transformers' configuration.
        attention: Its attention module.
        rotary: Its rotary embedding.
    """

    config: Any
    attention: Any
    rotary: Any

    def plan(self, start: int, hidden: torch.Tensor, cache: Any) -> tuple[Any, ...]:
        """What all layers share in a step: cosines and sines, positions, the mask.

        Args:
            start: Tokens of each request that `cache` holds.
            hidden: `[requests, tokens, hidden_size]`.
            cache: A `DynamicCache`.
        """
        from transformers.masking_utils import create_sliding_window_causal_mask

        positions = torch.arange(start, start + hidden.shape[1], device=hidden.device)[None]
        positions = positions.expand(len(hidden), -1)
        mask = create_sliding_window_causal_mask(self.config, hidden, None, cache, position_ids=positions)
        rope = {name: self.rotary(hidden, positions, name) for name in ("main", "compress")}
        return rope, positions, mask

    def attend(self, hidden: torch.Tensor, plan: tuple[Any, ...], cache: Any) -> torch.Tensor:
        """Attention of `hidden`, of its size; the cache gets its tokens."""
        out: torch.Tensor = self.attention(hidden, *plan, cache)[0]
        return out


def layer(inputs: Inputs) -> Measured:
    """The layer on a batch whose requests all have the asked context: its cache knows one length."""
    workload, device = inputs.workload, inputs.device
    if workload.phase == "mixed":
        raise Unmeasurable(
            "transformers' batches have one number of query tokens; leave out the phase mixed."
        )
    tokens = 1 if workload.phase == "decode" else workload.tokens
    start = max(workload.context, tokens) - tokens
    turns = inputs.turns("layer")

    def one(weights: LayerWeights, hidden: torch.Tensor) -> Call:
        made = build_layer(inputs.spec, weights, inputs.dtype, device)
        past = _past(made.config, inputs.spec, start, hidden)
        plan = made.plan(start, hidden, past)

        @torch.no_grad()
        def call() -> torch.Tensor:
            return made.attend(hidden, plan, _copied(past))

        return call

    calls = [
        one(weights, turn.hidden.unflatten(0, (-1, tokens)))
        for weights, turn in zip(inputs.weights(len(turns)), turns, strict=True)
    ]
    rows = {torch.bfloat16: "bf16", torch.float32: "fp32"}[inputs.dtype]
    # Its users run it eagerly: the cache grows, so that no graph would serve a second step.
    return Measured("layer", calls, cache_layout(inputs.spec.model, rows, rows), captured=False)


def build_layer(spec: LayerSpec, weights: LayerWeights, dtype: torch.dtype, device: torch.device) -> Layer:
    """One rank's layer with these weights: products in `dtype`, norms, sinks and biases in fp32."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    own = replace(
        spec.model,
        num_hidden_layers=1,
        layer_kinds=(spec.kind,),
        draft_layer_kinds=(),
        num_attention_heads=spec.num_heads,
        o_groups=spec.num_groups,
    )
    config: Any = DeepseekV4Config(**to_config(own) | {"attn_implementation": "eager"})
    with torch.device(device):
        attention = modeling.DeepseekV4Attention(config, 0).requires_grad_(False)
        rotary = modeling.DeepseekV4RotaryEmbedding(config)
    for module in attention.modules():
        if isinstance(module, torch.nn.Linear):
            module.to(dtype)
    attention.load_state_dict(_named(weights))
    return Layer(config, attention, rotary)


def _named(weights: LayerWeights) -> dict[str, torch.Tensor]:
    """The weights by transformers' names, FP8 ones as what they stand for."""
    found = {}
    for name, weight in weights.tensors.items():
        scope, _, own = LAYER_TENSORS[name][-1].partition(".")
        if scope == "self_attn":
            wide = weight.scale is not None and weight.block is not None
            data = dequantize_block(weight.data, weight.scale, weight.block) if wide else weight.data  # type: ignore[arg-type]
            found[own] = data
    return found


def _past(config: Any, spec: LayerSpec, length: int, like: torch.Tensor) -> Any:
    """A cache of `length` random tokens of each request, made by what the layer itself calls."""
    from transformers.cache_utils import DynamicCache

    cache, kind, requests = DynamicCache(config=config), spec.kind, len(like)
    if not length:
        return cache
    kept: Any = cache.layers[0]

    def rows(*size: int) -> torch.Tensor:
        return torch.randn(requests, *size, device=like.device).to(like.dtype)

    window = rows(1, min(length, spec.model.sliding_window - 1), spec.model.head_dim)
    kept.update(window, window)
    kept.cumulative_length = length
    if kind.ratio is None:
        return cache
    widths = {"compressor": spec.model.head_dim, "indexer": spec.model.index_head_dim}
    for name in kept.compressed_kv:
        width = widths[name]
        kept.update_compressor_states(name, rows(length // kind.ratio, width))
        open_group = rows(length % kind.ratio, kind.groups * width)
        kept.store_compression_weights(name, open_group, open_group)
        if kind.overlap:
            group = rows(1, kind.ratio, kind.groups * width)
            kept.update_overlap_state(name, group, group, width)
    return cache


def _copied(cache: Any) -> Any:
    """The same cache to write to: transformers puts new tensors in place of old ones, and changes none."""
    layer = copy.copy(cache.layers[0])
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(layer, name, dict(value))
    copied = copy.copy(cache)
    copied.layers = [layer]
    return copied
