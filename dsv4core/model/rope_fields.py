"""The RoPE keys of a `config.json`: official `rope_scaling`, transformers' `rope_parameters`. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dsv4core.api import ConfigError, RopeParameters, YarnParameters
from dsv4core.model.fields import agreed, find, number, whole

THETA = ("rope_theta", "rope_parameters.main.rope_theta", "rope_parameters.rope_theta")
COMPRESS_THETA = ("compress_rope_theta", "rope_parameters.compress.rope_theta")
PARTIAL_FACTOR = (
    "partial_rotary_factor",
    "rope_parameters.main.partial_rotary_factor",
    "rope_parameters.compress.partial_rotary_factor",
    "rope_parameters.partial_rotary_factor",
)

_YARN_REQUIRED = ("factor", "original_max_position_embeddings")
_ROPE_KEYS = {
    *_YARN_REQUIRED,
    *("type", "rope_type", "rope_theta", "partial_rotary_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}


def missing_rope_keys(config: Mapping[str, Any]) -> list[str]:
    """The RoPE keys that no spelling gives, by official name."""
    spellings = {
        "qk_rope_head_dim": ("qk_rope_head_dim", *PARTIAL_FACTOR),
        "rope_theta": THETA,
        "compress_rope_theta": COMPRESS_THETA,
    }
    missing = [name for name, paths in spellings.items() if all(find(config, path) is None for path in paths)]
    if "rope_scaling" not in config and "rope_parameters" not in config:
        missing.append("rope_scaling (or rope_parameters)")
    for where, block in _compress_blocks(config).items():
        if _rope_type(block) == "yarn":
            missing += [f"{where}.{key}" for key in _YARN_REQUIRED if block.get(key) is None]
    return missing


def rope_dim(config: Mapping[str, Any], head_dim: int) -> int:
    """Rotated channels of a head, from `qk_rope_head_dim` or from `partial_rotary_factor * head_dim`.

    Raises:
        ConfigError: The spellings disagree, or a factor does not give a whole number of channels.
    """
    dims = {}
    if find(config, "qk_rope_head_dim") is not None:
        dims["qk_rope_head_dim"] = whole(config, "qk_rope_head_dim")
    for path in PARTIAL_FACTOR:
        if find(config, path) is not None:
            channels = number(config, path) * head_dim
            if not math.isclose(channels, round(channels)):
                raise ConfigError(
                    f"{path} is {find(config, path)}, which makes {channels} rotated channels of head_dim "
                    f"{head_dim}; it must make a whole number."
                )
            dims[f"{path} * head_dim"] = round(channels)
    return agreed(dims)


def rope_parameters(config: Mapping[str, Any]) -> tuple[RopeParameters, RopeParameters]:
    """RoPE of window-only layers, and of layers with a compressor.

    Only the latter have YaRN, and without a magnitude factor (DeepSeek-V4's official inference/model.py).

    Raises:
        ConfigError: A value is unknown, impossible, or contradicts another spelling.
    """
    main = _block(config, "rope_parameters.main")
    if main is not None and _rope_type(main) != "default":
        raise ConfigError(
            f"rope_parameters.main asks for {_rope_type(main)!r} RoPE, but window-only layers of DeepSeek-V4 "
            "use plain RoPE; set its rope_type to 'default'."
        )
    yarns = {where: _yarn(config, where, block) for where, block in _compress_blocks(config).items()}
    return (
        RopeParameters(theta=number(config, *THETA)),
        RopeParameters(theta=number(config, *COMPRESS_THETA), yarn=agreed(yarns) if yarns else None),
    )


def _block(config: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
    block = find(config, path)
    if block is not None and not isinstance(block, Mapping):
        raise ConfigError(f"{path} is {block!r}; it must be an object of RoPE values or null.")
    return block


def _compress_blocks(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The RoPE values of layers with a compressor, by spelling."""
    parameters = _block(config, "rope_parameters") or {}
    nested = "main" in parameters or "compress" in parameters
    paths = ("rope_scaling", "rope_parameters.compress" if nested else "rope_parameters")
    return {path: block for path in paths if (block := _block(config, path)) is not None}


def _rope_type(block: Mapping[str, Any]) -> str:
    return str(block.get("rope_type", block.get("type", "default")))


def _yarn(config: Mapping[str, Any], where: str, block: Mapping[str, Any]) -> YarnParameters | None:
    if unknown := sorted(set(block) - _ROPE_KEYS):
        raise ConfigError(
            f"{where} has keys that are not known and may change the frequencies: {', '.join(unknown)}; "
            "remove them."
        )
    if _rope_type(block) == "default":
        return None
    if _rope_type(block) != "yarn":
        raise ConfigError(
            f"{where} asks for {_rope_type(block)!r} RoPE; layers of DeepSeek-V4 use 'yarn' or 'default'."
        )
    _refuse_magnitude(where, block)
    given = (key for key in ("beta_fast", "beta_slow") if block.get(key) is not None)
    betas = {key: number(config, f"{where}.{key}") for key in given}
    yarn = YarnParameters(
        factor=number(config, f"{where}.factor"),
        original_max_position_embeddings=whole(config, f"{where}.original_max_position_embeddings"),
        **betas,
    )
    if yarn.factor < 1:
        raise ConfigError(
            f"{where}.factor is {yarn.factor}; YaRN stretches a context, so it must be at least 1."
        )
    if yarn.beta_fast <= yarn.beta_slow:
        raise ConfigError(
            f"{where}.beta_fast is {yarn.beta_fast} and beta_slow {yarn.beta_slow}; beta_fast must be larger."
        )
    return yarn


def _refuse_magnitude(where: str, block: Mapping[str, Any]) -> None:
    if block.get("attention_factor") not in (None, 1) or block.get("mscale") != block.get("mscale_all_dim"):
        raise ConfigError(
            f"{where} scales the magnitude of rotated channels (attention_factor, mscale or mscale_all_dim), "
            "but DeepSeek-V4 does not; remove those keys."
        )
    if block.get("truncate") not in (None, True):
        raise ConfigError(f"{where}.truncate is false, but DeepSeek-V4 rounds YaRN's bounds; remove the key.")
