"""The layer kinds in a `config.json`: official `compress_ratios`, transformers' `layer_types`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dsv4core.api import C4A, C128A, SWA, ConfigError, LayerKind
from dsv4core.model.fields import find, whole

_DEFAULTS = {
    "sliding_attention": SWA,
    "compressed_sparse_attention": C4A,
    "heavily_compressed_attention": C128A,
}
_RATES = {
    "compressed_sparse_attention": ("compress_rates.compressed_sparse_attention", "compress_rate_csa"),
    "heavily_compressed_attention": ("compress_rates.heavily_compressed_attention", "compress_rate_hca"),
}


def layer_kinds(config: Mapping[str, Any], count: int) -> tuple[LayerKind, ...]:
    """Kinds of the `count` backbone layers and of the draft layers that are listed after them.

    A ratio of 0 or 1 means window-only; what another ratio means follows from the layer type that has it.

    Raises:
        ConfigError: A ratio or type is not known, a layer has none, or two spellings disagree.
    """
    by_type = _kinds_by_type(config)
    by_ratio = {0: SWA, 1: SWA} | {kind.ratio: kind for kind in by_type.values() if kind.ratio}
    from_ratios = _kinds(config, "compress_ratios", by_ratio, count)
    from_types = _kinds(config, "layer_types", by_type, count)
    for index, (one, other) in enumerate(zip(from_ratios, from_types, strict=False)):
        if one != other:
            raise ConfigError(
                f"compress_ratios makes layer {index} {one.name}, but layer_types makes it {other.name}; "
                "both mean the same, so remove one."
            )
    return max(from_ratios, from_types, key=len)


def _kinds(
    config: Mapping[str, Any], key: str, table: Mapping[Any, LayerKind], count: int
) -> tuple[LayerKind, ...]:
    entries = config.get(key)
    if entries is None:
        return ()
    if not isinstance(entries, list | tuple) or len(entries) < count:
        raise ConfigError(
            f"{key} is {entries!r}; it must be a list with an entry for each of the {count} layers that "
            "num_hidden_layers counts."
        )
    for index, entry in enumerate(entries):
        if type(entry) not in (int, str) or entry not in table:
            known = ", ".join(f"{name!r} ({kind.name})" for name, kind in table.items())
            by = " by compress_rates" if config.get("compress_rates") else ""
            raise ConfigError(f"{key}[{index}] is {entry!r}, which is not known; known{by} are {known}.")
    return tuple(table[entry] for entry in entries)


def _kinds_by_type(config: Mapping[str, Any]) -> dict[str, LayerKind]:
    rates = config.get("compress_rates") or {}
    if not isinstance(rates, Mapping) or not set(rates) <= set(_RATES):
        raise ConfigError(f"compress_rates is {rates!r}; it may give a rate for {' and '.join(_RATES)} only.")
    kinds = dict(_DEFAULTS)
    for layer_type, paths in _RATES.items():
        if any(find(config, path) is not None for path in paths):
            kinds[layer_type] = replace(kinds[layer_type], ratio=whole(config, *paths))
    sparse, heavy = (kinds[layer_type].ratio for layer_type in _RATES)
    if sparse == heavy or 1 in (sparse, heavy):
        raise ConfigError(
            f"compress_rates makes rates {sparse} and {heavy}; they must differ and be above 1."
        )
    return kinds
