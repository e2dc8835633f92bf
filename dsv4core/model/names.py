"""The one table of tensor names: official DeepSeek-V4 checkpoints, and what transformers writes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dsv4core.api import ModelShape

LAYER_TENSORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attn_norm": ("attn_norm.weight", "input_layernorm.weight"),
        "attn_sink": ("attn.attn_sink", "self_attn.sinks"),
        "wq_a": ("attn.wq_a.weight", "self_attn.q_a_proj.weight"),
        "q_norm": ("attn.q_norm.weight", "self_attn.q_a_norm.weight"),
        "wq_b": ("attn.wq_b.weight", "self_attn.q_b_proj.weight"),
        "wkv": ("attn.wkv.weight", "self_attn.kv_proj.weight"),
        "kv_norm": ("attn.kv_norm.weight", "attn.norm.weight", "self_attn.kv_norm.weight"),
        "wo_a": ("attn.wo_a.weight", "self_attn.o_a_proj.weight"),
        "wo_b": ("attn.wo_b.weight", "self_attn.o_b_proj.weight"),
        "compressor.ape": ("attn.compressor.ape", "self_attn.compressor.position_bias"),
        "compressor.wkv": ("attn.compressor.wkv.weight", "self_attn.compressor.kv_proj.weight"),
        "compressor.wgate": ("attn.compressor.wgate.weight", "self_attn.compressor.gate_proj.weight"),
        "compressor.norm": ("attn.compressor.norm.weight", "self_attn.compressor.kv_norm.weight"),
        "indexer.wq_b": ("attn.indexer.wq_b.weight", "self_attn.compressor.indexer.q_b_proj.weight"),
        "indexer.weights_proj": (
            "attn.indexer.weights_proj.weight",
            "self_attn.compressor.indexer.scorer.weights_proj.weight",
        ),
        "indexer.compressor.ape": (
            "attn.indexer.compressor.ape",
            "self_attn.compressor.indexer.position_bias",
        ),
        "indexer.compressor.wkv": (
            "attn.indexer.compressor.wkv.weight",
            "self_attn.compressor.indexer.kv_proj.weight",
        ),
        "indexer.compressor.wgate": (
            "attn.indexer.compressor.wgate.weight",
            "self_attn.compressor.indexer.gate_proj.weight",
        ),
        "indexer.compressor.norm": (
            "attn.indexer.compressor.norm.weight",
            "self_attn.compressor.indexer.kv_norm.weight",
        ),
    }
)
"""Spellings of a layer's tensors below the layer's prefix, the official one first. Keys are our names."""

SCALARS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "q": ("attn.q_scale", "self_attn.q_scale"),
        "kv": ("attn.kv_scale", "self_attn.kv_scale"),
    }
)
"""Spellings of a layer's scales for plain FP8 queries and caches, which few checkpoints have."""

ATTENTION_SCOPES = ("attn.", "self_attn.")
"""Where a layer's attention tensors lie below its prefix."""

SCALE_SUFFIXES = (".scale", ".weight_scale_inv")
"""What stands in place of `.weight` in the name of an FP8 weight's scale, the official one first."""

EMBEDDING = ("embed.weight", "model.embed_tokens.weight", "embed_tokens.weight")
"""Spellings of the token embedding, the official one first."""


def layer_prefixes(shape: ModelShape, index: int) -> tuple[str, ...]:
    """Spellings of what precedes the names of layer `index`, the official one first.

    Draft layers are numbered apart in official checkpoints (`mtp.0.`) and on from the backbone in others.
    """
    prefixes = (f"layers.{index}.", f"model.layers.{index}.")
    draft = index - shape.num_hidden_layers
    return prefixes if draft < 0 else (f"mtp.{draft}.", f"model.mtp.{draft}.", *prefixes)


def layer_names(shape: ModelShape, index: int, name: str) -> list[str]:
    """Every spelling of tensor `name` of layer `index`, the official one first."""
    return [prefix + spelling for prefix in layer_prefixes(shape, index) for spelling in LAYER_TENSORS[name]]


def scalar_names(shape: ModelShape, index: int, name: str) -> list[str]:
    """Every spelling of the scale `name` of layer `index`, the official one first."""
    return [prefix + spelling for prefix in layer_prefixes(shape, index) for spelling in SCALARS[name]]


def scale_names(weight: str) -> list[str]:
    """Every spelling of the scale of the tensor called `weight`, the official one first."""
    return [weight.removesuffix(".weight") + suffix for suffix in SCALE_SUFFIXES]
