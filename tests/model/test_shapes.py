"""`config.json` in both spellings, its refusals, presets, and a rank's share of a layer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4core.api import (
    C4A,
    C128A,
    SWA,
    CheckpointError,
    ConfigError,
    LayerKind,
    RopeParameters,
    YarnParameters,
)
from dsv4core.model.shapes import (
    PRESETS,
    layer_kind,
    layer_spec,
    load_model_shape,
    model_shape,
    to_config,
    weight_block,
)

TYPES = {SWA: "sliding_attention", C4A: "compressed_sparse_attention", C128A: "heavily_compressed_attention"}


def official(**changes: Any) -> dict[str, Any]:
    """The tiny preset as the official config spells it."""
    return to_config(PRESETS["tiny"]) | changes


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def nested(**changes: Any) -> dict[str, Any]:
    """The same as transformers saves it."""
    config = without(
        official(),
        *("compress_ratios", "rope_scaling", "rope_theta", "compress_rope_theta", "qk_rope_head_dim"),
    )
    yarn = to_config(PRESETS["tiny"])["rope_scaling"]
    compress = without(yarn, "type") | {
        "rope_type": "yarn",
        "rope_theta": 160000.0,
        "partial_rotary_factor": 0.125,
        "attention_factor": 1.0,
    }
    main = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125}
    return {
        **config,
        "layer_types": [TYPES[kind] for kind in PRESETS["tiny"].layer_kinds],
        "compress_rates": {TYPES[C4A]: 4, TYPES[C128A]: 128},
        "rope_parameters": {"main": main, "compress": compress},
        "partial_rotary_factor": 0.125,
        **changes,
    }


def flat(**changes: Any) -> dict[str, Any]:
    """The same as a user of transformers writes it."""
    yarn = nested()["rope_parameters"]["compress"]
    values = without(yarn, "rope_theta", "partial_rotary_factor", "attention_factor")
    thetas = {"rope_theta": 10000, "compress_rope_theta": 160000}
    return nested(rope_parameters=values, **thetas) | changes


NO_DRAFT = replace(PRESETS["tiny"], draft_layer_kinds=())


@pytest.mark.parametrize("name", PRESETS)
def test_config_round_trip(name: str) -> None:
    config = to_config(PRESETS[name])
    assert model_shape(json.loads(json.dumps(config))) == PRESETS[name]


def test_v4_flash_layers() -> None:
    ratios = to_config(PRESETS["v4_flash"])["compress_ratios"]
    assert ratios == [0, 0, *[4, 128] * 20, 4, 0]
    assert (len(ratios), ratios.count(4), ratios.count(128)) == (44, 21, 20)
    assert PRESETS["v4_flash"].draft_layer_kinds == (SWA,)
    assert all(ratios[index] == (4 if index % 2 == 0 else 128) for index in range(2, 43))


def test_v4_pro_layers() -> None:
    ratios = to_config(PRESETS["v4_pro"])["compress_ratios"]
    assert ratios == [128, 128, *[4, 128] * 29, 4, 0]
    assert (len(ratios), ratios.count(0)) == (62, 1)
    pro = PRESETS["v4_pro"]
    assert (pro.hidden_size, pro.num_attention_heads, pro.q_lora_rank) == (7168, 128, 1536)
    assert (pro.o_groups, pro.index_topk, pro.num_hidden_layers) == (16, 1024, 61)


def test_tiny_has_every_kind() -> None:
    tiny = PRESETS["tiny"]
    assert tiny.layer_kinds == (SWA, C4A, C128A, C4A, SWA)
    assert tiny.draft_layer_kinds == (SWA,)
    assert tiny.compress_rope == RopeParameters(160000.0, YarnParameters(16.0, 1024, 32.0, 1.0))
    assert tiny.rope == RopeParameters(10000.0)


@pytest.mark.parametrize("spelling", [nested, flat])
def test_spelling_of_transformers_is_the_same_shape(spelling: Callable[[], dict[str, Any]]) -> None:
    assert model_shape(spelling()) == NO_DRAFT


def test_both_spellings_may_stand_together() -> None:
    assert model_shape(nested() | official()) == PRESETS["tiny"]


def test_transformers_reads_our_config_as_we_do() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.DeepseekV4Config(**to_config(PRESETS["v4_flash"])).to_dict()
    assert model_shape(theirs) == replace(PRESETS["v4_flash"], draft_layer_kinds=())


def test_config_is_not_written_to() -> None:
    for config in (official(), nested(), flat()):
        before = copy.deepcopy(config)
        model_shape(config)
        assert config == before


def test_ratio_one_is_window_only() -> None:
    assert model_shape(official(compress_ratios=[1, 4, 128, 4, 1])).layer_kinds == PRESETS["tiny"].layer_kinds


def test_extra_ratios_are_draft_layers() -> None:
    shape = model_shape(official(compress_ratios=[0, 4, 128, 4, 0, 4, 0, 128]))
    assert shape.draft_layer_kinds == (C4A, SWA, C128A)


def test_other_rates_keep_their_type() -> None:
    rates = {TYPES[C4A]: 8, TYPES[C128A]: 64}
    kinds = model_shape(nested(compress_rates=rates)).layer_kinds
    assert kinds[1] == LayerKind(ratio=8, select="top_k", overlap=True)
    assert kinds[2] == LayerKind(ratio=64, select="all", overlap=False)
    assert model_shape(official(compress_rates=rates, compress_ratios=[0, 8, 64, 8, 0])).layer_kinds == kinds
    with pytest.raises(ConfigError, match=r"cannot spell the layer kind LayerKind\(ratio=8"):
        to_config(model_shape(nested(compress_rates=rates)))


def test_no_scaling_means_plain_rope() -> None:
    plain = RopeParameters(160000.0)
    assert model_shape(official(rope_scaling=None)).compress_rope == plain
    assert to_config(model_shape(official(rope_scaling=None)))["rope_scaling"] is None


def test_all_missing_keys_in_one_error() -> None:
    config = without(official(), "head_dim", "o_groups", "compress_ratios", "compress_rope_theta")
    config["rope_scaling"] = {"type": "yarn"}
    with pytest.raises(ConfigError) as error:
        model_shape(config)
    assert str(error.value) == (
        "The model's config lacks head_dim, o_groups, compress_ratios (or layer_types), compress_rope_theta, "
        "rope_scaling.factor, rope_scaling.original_max_position_embeddings; add what is missing."
    )
    with pytest.raises(ConfigError, match=r"lacks rope_scaling \(or rope_parameters\); add"):
        model_shape(without(official(), "rope_scaling"))


YARN = official()["rope_scaling"]
REFUSALS: list[tuple[dict[str, Any], str]] = [
    (official(model_type="deepseek_v3"), "model_type is 'deepseek_v3'; only 'deepseek_v4' is computed here."),
    (official(attention_bias=True), "attention_bias is true, but attention of DeepSeek-V4 has no biases"),
    (official(num_key_value_heads=8), "num_key_value_heads is 8; DeepSeek-V4 has one key head"),
    (
        official(quantization_config={"quant_method": "awq"}),
        "quantization_config.quant_method is 'awq'; only DeepSeek's block-scaled FP8 ('fp8') can be read",
    ),
    (
        official(quantization_config={"quant_method": "fp8", "activation_scheme": "static"}),
        "quantization_config.activation_scheme is 'static'",
    ),
    (
        official(quantization_config={"quant_method": "fp8", "weight_block_size": [128]}),
        "quantization_config.weight_block_size is [128]; it must be two positive whole numbers.",
    ),
    (official(hidden_size=0), "hidden_size is 0; it must be a positive whole number."),
    (official(index_topk=-64), "index_topk is -64; it must be a positive whole number."),
    (official(head_dim="512"), "head_dim is '512'; it must be a positive whole number."),
    (official(head_dim=True), "head_dim is True; it must be a positive whole number."),
    (official(vocab_size=512.0), "vocab_size is 512.0; it must be a positive whole number."),
    (official(rms_norm_eps=0), "rms_norm_eps is 0; it must be a positive number."),
    (official(rope_theta=float("nan")), "rope_theta is nan; it must be a positive number."),
    (official(o_groups=3), "num_attention_heads = 16 is not a multiple of o_groups = 3"),
    (official(head_dim=64), "head_dim = 64 leaves nothing beside the qk_rope_head_dim = 64 rotated channels"),
    (official(index_head_dim=32), "index_head_dim = 32 leaves nothing beside"),
    (official(qk_rope_head_dim=63), "qk_rope_head_dim = 63 is odd; channels are rotated in pairs."),
    (
        official(compress_ratios=[0, 4, 128, 4]),
        "compress_ratios is [0, 4, 128, 4]; it must be a list with an entry for each of the 5 layers",
    ),
    (
        official(compress_ratios=[0, 4, 128, 2, 0]),
        "compress_ratios[3] is 2, which is not known; known are 0 (swa), 1 (swa), 4 (c4a), 128 (c128a).",
    ),
    (
        official(compress_rates={TYPES[C4A]: 8, TYPES[C128A]: 128}),
        "compress_ratios[1] is 4, which is not known; known by compress_rates are 0 (swa), 1 (swa), 8 (c8a)",
    ),
    (official(compress_ratios=[0, 4, None, 4, 0]), "compress_ratios[2] is None, which is not known"),
    (official(compress_rates={"full_attention": 4}), "compress_rates is {'full_attention': 4}; it may give"),
    (
        official(compress_rates={TYPES[C4A]: 4, TYPES[C128A]: 4}),
        "compress_rates makes rates 4 and 4; they must differ and be above 1.",
    ),
    (
        nested(layer_types=["full_attention"] * 5),
        "layer_types[0] is 'full_attention', which is not known; known by compress_rates are "
        "'sliding_attention' (swa), 'compressed_sparse_attention' (c4a)",
    ),
    (
        nested(compress_ratios=[0, 4, 4, 4, 0]),
        "compress_ratios makes layer 2 c4a, but layer_types makes it c128a; both mean the same",
    ),
    (
        nested(qk_rope_head_dim=32),
        "qk_rope_head_dim says 32 but partial_rotary_factor * head_dim says 64; both mean the same",
    ),
    (nested(partial_rotary_factor=0.123), "partial_rotary_factor is 0.123, which makes 62.976 rotated"),
    (nested(rope_theta=5000.0), "rope_theta says 5000.0 but rope_parameters.main.rope_theta says 10000.0"),
    (
        nested(rope_scaling=YARN | {"factor": 8}),
        "rope_scaling says YarnParameters(factor=8.0, original_max_position_embeddings=1024, beta_fast=32.0, "
        "beta_slow=1.0) but rope_parameters.compress says YarnParameters(factor=16.0",
    ),
    (official(rope_scaling=YARN | {"type": "linear"}), "rope_scaling asks for 'linear' RoPE"),
    (official(rope_scaling=YARN | {"alpha": 2}), "rope_scaling has keys that are not known"),
    (official(rope_scaling=YARN | {"attention_factor": 1.3}), "rope_scaling scales the magnitude of rotated"),
    (official(rope_scaling=YARN | {"mscale": 1.0}), "rope_scaling scales the magnitude of rotated channels"),
    (official(rope_scaling=YARN | {"truncate": False}), "rope_scaling.truncate is false"),
    (official(rope_scaling=YARN | {"factor": 0.5}), "rope_scaling.factor is 0.5; YaRN stretches a context"),
    (official(rope_scaling=YARN | {"beta_slow": 32}), "rope_scaling.beta_fast is 32.0 and beta_slow 32.0"),
    (official(rope_scaling=[16]), "rope_scaling is [16]; it must be an object of RoPE values or null."),
    (
        nested(rope_parameters={**nested()["rope_parameters"], "main": YARN | {"rope_theta": 10000.0}}),
        "rope_parameters.main asks for 'yarn' RoPE, but window-only layers of DeepSeek-V4 use plain RoPE",
    ),
]


@pytest.mark.parametrize(("config", "sentence"), REFUSALS, ids=[text[:40] for _, text in REFUSALS])
def test_refusal_names_the_value(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        model_shape(config)
    assert sentence in str(error.value)


def test_load_model_shape(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is not a directory; give the one that holds config"):
        load_model_shape(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json; give the directory of a DeepSeek-V4"):
        load_model_shape(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(
        ConfigError, match=r"config\.json is not valid JSON \(.*line 1.*\); download it again"
    ):
        load_model_shape(tmp_path)
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"holds a list; it must hold one JSON object"):
        load_model_shape(tmp_path)
    file.write_text(json.dumps(official()))
    assert load_model_shape(tmp_path) == PRESETS["tiny"]


def test_weight_block() -> None:
    assert weight_block({}) == (128, 128)
    assert weight_block({"quantization_config": {"quant_method": "fp8"}}) == (128, 128)
    fp8 = {"quant_method": "fp8", "weight_block_size": [32, 64]}
    assert weight_block({"quantization_config": fp8}) == (32, 64)


def test_layer_kind_of_draft_layers() -> None:
    shape = replace(PRESETS["tiny"], draft_layer_kinds=(C4A,))
    assert [layer_kind(shape, index) for index in (2, 4, 5, 6, 99)] == [C128A, SWA, C4A, SWA, SWA]
    with pytest.raises(ConfigError, match="Layer -1 was asked for; layers are numbered from 0"):
        layer_kind(shape, -1)


def test_layer_spec_shares_heads_and_groups() -> None:
    shape = PRESETS["tiny"]
    spec = layer_spec(shape, 3, tp_rank=3, tp_size=4)
    assert (spec.index, spec.kind, spec.model) == (3, C4A, shape)
    assert (spec.num_heads, spec.head_start, spec.num_groups) == (4, 12, 2)
    alone = layer_spec(shape, 0)
    assert (alone.num_heads, alone.head_start, alone.num_groups) == (16, 0, 8)


def test_layer_spec_refuses_uneven_shares() -> None:
    with pytest.raises(ConfigError, match="size of 3 does not divide num_attention_heads = 16; use one that"):
        layer_spec(PRESETS["tiny"], 0, tp_size=3)
    with pytest.raises(ConfigError, match="size of 16 does not divide o_groups = 8; use one that divides"):
        layer_spec(PRESETS["tiny"], 0, tp_size=16)
    with pytest.raises(ConfigError, match="Rank 2 of 2 was asked for; ranks are numbered from 0"):
        layer_spec(PRESETS["tiny"], 0, tp_rank=2, tp_size=2)
