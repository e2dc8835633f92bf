"""A model's sizes and layer kinds: read from a `config.json`, written to one, and as presets. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dsv4core.api import (
    C4A,
    C128A,
    SWA,
    CheckpointError,
    ConfigError,
    LayerKind,
    LayerSpec,
    ModelShape,
    RopeParameters,
    YarnParameters,
)
from dsv4core.model.fields import find, number, whole
from dsv4core.model.kind_fields import layer_kinds
from dsv4core.model.rope_fields import missing_rope_keys, rope_dim, rope_parameters

MODEL_TYPE = "deepseek_v4"

_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups"),
    *("o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "vocab_size"),
    "max_position_embeddings",
)


def read_config(directory: str | Path) -> dict[str, Any]:
    """The content of `config.json` in `directory`.

    Raises:
        CheckpointError: `directory` is not one, or has no config.json.
        ConfigError: config.json is not a JSON object.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give the one that holds config.json.")
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no config.json; give the directory of a DeepSeek-V4 checkpoint."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}; it must hold one JSON object.")
    return config


def load_model_shape(directory: str | Path) -> ModelShape:
    """`model_shape` of the `config.json` in `directory`; raises what it and `read_config` raise."""
    return model_shape(read_config(directory))


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """The sizes and layer kinds that a DeepSeek-V4 `config.json` describes.

    Takes the official spelling (`compress_ratios`, `rope_scaling`, `compress_rope_theta`,
    `qk_rope_head_dim`), that of transformers (`layer_types`, `compress_rates`, `rope_parameters`,
    `partial_rotary_factor`), and both at once where they agree. Nothing is written to `config`.

    Raises:
        ConfigError: Keys are missing (all in one error), or a value is impossible, not served here, or
            contradicts another.
    """
    _refuse_unserved(config)
    if missing := _missing_keys(config):
        raise ConfigError(f"The model's config lacks {', '.join(missing)}; add what is missing.")
    sizes = {name: whole(config, name) for name in _SIZES}
    kinds = layer_kinds(config, sizes["num_hidden_layers"])
    rope, compress_rope = rope_parameters(config)
    shape = ModelShape(
        **sizes,
        qk_rope_head_dim=rope_dim(config, sizes["head_dim"]),
        rms_norm_eps=number(config, "rms_norm_eps"),
        layer_kinds=kinds[: sizes["num_hidden_layers"]],
        draft_layer_kinds=kinds[sizes["num_hidden_layers"] :],
        rope=rope,
        compress_rope=compress_rope,
    )
    _refuse_impossible(shape)
    return shape


def weight_block(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of an FP8 weight that share a scale; DeepSeek's 128 x 128 where nothing is said.

    Raises:
        ConfigError: `quantization_config` asks for something else than DeepSeek's block-scaled FP8.
    """
    if config.get("quantization_config") is None:
        return (128, 128)
    served = {"quant_method": ("fp8",), "fmt": ("e4m3", None), "activation_scheme": ("dynamic", None)}
    for key, values in served.items():
        if (value := find(config, f"quantization_config.{key}")) not in values:
            raise ConfigError(
                f"quantization_config.{key} is {value!r}; only DeepSeek's block-scaled FP8 ({values[0]!r}) "
                "can be read, so use a checkpoint of that kind or one that is not quantised."
            )
    block = find(config, "quantization_config.weight_block_size")
    match block if block is not None else [128, 128]:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return (rows, columns)
    raise ConfigError(
        f"quantization_config.weight_block_size is {block!r}; it must be two positive whole numbers."
    )


def to_config(shape: ModelShape) -> dict[str, Any]:
    """`shape` as the attention keys of a `config.json` in the official spelling; `model_shape` reads it back.

    Raises:
        ConfigError: A layer kind, or YaRN in window-only layers, has no official spelling.
    """
    ratios = {SWA: 0, C4A: 4, C128A: 128}
    kinds = (*shape.layer_kinds, *shape.draft_layer_kinds)
    if unknown := [kind for kind in kinds if kind not in ratios]:
        raise ConfigError(
            f"The official config.json of DeepSeek-V4 cannot spell the layer kind {unknown[0]}."
        )
    if shape.rope.yarn is not None:
        raise ConfigError("The official config.json of DeepSeek-V4 cannot spell YaRN in window-only layers.")
    yarn = shape.compress_rope.yarn
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": MODEL_TYPE,
        **{name: getattr(shape, name) for name in _SIZES},
        "attention_bias": False,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": len(shape.draft_layer_kinds),
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope.theta,
        "compress_rope_theta": shape.compress_rope.theta,
        "rope_scaling": None if yarn is None else {"type": "yarn", **vars(yarn)},
        "compress_ratios": [ratios[kind] for kind in kinds],
    }


def layer_kind(shape: ModelShape, index: int) -> LayerKind:
    """The kind of layer `index`; from `num_hidden_layers` on, of a draft layer (window-only if unlisted).

    Raises:
        ConfigError: `index` is negative.
    """
    if index < 0:
        raise ConfigError(f"Layer {index} was asked for; layers are numbered from 0.")
    kinds = (*shape.layer_kinds, *shape.draft_layer_kinds)
    return kinds[index] if index < len(kinds) else SWA


def layer_spec(shape: ModelShape, index: int, tp_rank: int = 0, tp_size: int = 1) -> LayerSpec:
    """Layer `index` on rank `tp_rank` of the `tp_size` that share heads and output groups.

    Raises:
        ConfigError: `tp_size` does not divide heads and groups, or `tp_rank` or `index` is out of range.
    """
    if not 0 <= tp_rank < tp_size:
        raise ConfigError(f"Rank {tp_rank} of {tp_size} was asked for; ranks are numbered from 0.")
    for name in ("num_attention_heads", "o_groups"):
        if getattr(shape, name) % tp_size:
            raise ConfigError(
                f"A tensor-parallel size of {tp_size} does not divide {name} = {getattr(shape, name)}; use "
                "one that divides heads and groups."
            )
    heads = shape.num_attention_heads // tp_size
    return LayerSpec(
        index=index,
        kind=layer_kind(shape, index),
        model=shape,
        num_heads=heads,
        head_start=tp_rank * heads,
        num_groups=shape.o_groups // tp_size,
    )


def _refuse_unserved(config: Mapping[str, Any]) -> None:
    if (model_type := config.get("model_type")) not in (None, MODEL_TYPE):
        raise ConfigError(f"model_type is {model_type!r}; only {MODEL_TYPE!r} is computed here.")
    if config.get("attention_bias"):
        raise ConfigError(
            "attention_bias is true, but attention of DeepSeek-V4 has no biases; set it to false."
        )
    if (kv_heads := config.get("num_key_value_heads")) not in (None, 1):
        raise ConfigError(
            f"num_key_value_heads is {kv_heads!r}; DeepSeek-V4 has one key head, so it must be 1."
        )
    weight_block(config)


def _missing_keys(config: Mapping[str, Any]) -> list[str]:
    required = ("model_type", *_SIZES, "rms_norm_eps")
    missing = [name for name in required if config.get(name) is None]
    if config.get("compress_ratios") is None and config.get("layer_types") is None:
        missing.append("compress_ratios (or layer_types)")
    return missing + missing_rope_keys(config)


def _refuse_impossible(shape: ModelShape) -> None:
    if shape.num_attention_heads % shape.o_groups:
        raise ConfigError(
            f"num_attention_heads = {shape.num_attention_heads} is not a multiple of o_groups = "
            f"{shape.o_groups}; each output group needs the same number of heads."
        )
    if shape.qk_rope_head_dim % 2:
        raise ConfigError(
            f"qk_rope_head_dim = {shape.qk_rope_head_dim} is odd; channels are rotated in pairs."
        )
    for name in ("head_dim", "index_head_dim"):
        if getattr(shape, name) <= shape.qk_rope_head_dim:
            raise ConfigError(
                f"{name} = {getattr(shape, name)} leaves nothing beside the qk_rope_head_dim = "
                f"{shape.qk_rope_head_dim} rotated channels; it must be larger."
            )


_FLASH = ModelShape(
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    rms_norm_eps=1e-6,
    vocab_size=129280,
    max_position_embeddings=1048576,
    layer_kinds=(SWA, SWA, *(C4A, C128A) * 20, C4A),
    draft_layer_kinds=(SWA,),
    rope=RopeParameters(theta=10000.0),
    compress_rope=RopeParameters(theta=160000.0, yarn=YarnParameters(16.0, 65536)),
)
_PRO = replace(
    _FLASH,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    index_topk=1024,
    layer_kinds=(C128A, C128A, *(C4A, C128A) * 29, C4A),
)
_TINY = replace(
    _FLASH,
    hidden_size=256,
    num_hidden_layers=5,
    num_attention_heads=16,
    q_lora_rank=128,
    o_lora_rank=128,
    index_n_heads=8,
    index_topk=64,
    vocab_size=512,
    max_position_embeddings=16384,
    layer_kinds=(SWA, C4A, C128A, C4A, SWA),
    compress_rope=RopeParameters(theta=160000.0, yarn=YarnParameters(16.0, 1024)),
)

PRESETS: Mapping[str, ModelShape] = MappingProxyType({"v4_flash": _FLASH, "v4_pro": _PRO, "tiny": _TINY})
"""Published models by name, and `tiny`: every layer kind at real head sizes, small enough for a test."""
