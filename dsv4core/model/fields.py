"""Checked values out of a `config.json` that may spell one thing in several ways. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from dsv4core.api import ConfigError

T = TypeVar("T")


def find(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path such as `rope_parameters.main.rope_theta`, None where there is none."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def agreed(values: Mapping[str, T]) -> T:
    """The value that all spellings give.

    Args:
        values: Value by spelling, at least one.

    Raises:
        ConfigError: Two spellings disagree.
    """
    (first, value), *others = values.items()
    for spelling, other in others:
        if other != value:
            raise ConfigError(
                f"{first} says {value} but {spelling} says {other}; both mean the same, so remove one."
            )
    return value


def whole(config: Mapping[str, Any], *paths: str) -> int:
    """The positive whole number that all present spellings give.

    Raises:
        ConfigError: A value is not a positive whole number, or two spellings disagree.
    """
    values = _present(config, paths)
    for path, value in values.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{path} is {value!r}; it must be a positive whole number.")
    return agreed(values)


def number(config: Mapping[str, Any], *paths: str) -> float:
    """The positive, finite number that all present spellings give.

    Raises:
        ConfigError: A value is not a positive number, or two spellings disagree.
    """
    values = _present(config, paths)
    for path, value in values.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ConfigError(f"{path} is {value!r}; it must be a positive number.")
    return float(agreed(values))


def _present(config: Mapping[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    found = {path: find(config, path) for path in paths}
    return {path: value for path, value in found.items() if value is not None}
