"""The adapter's configuration, which comes through vLLM's own: `additional_config={"dsv4": {…}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dsv4core.api import ConfigError

KEY = "dsv4"


@dataclass(frozen=True)
class AdapterOptions:
    """What a user may set under `dsv4`.

    Attributes:
        backend: A name, or `auto`: the first of dsv4core's order that can run.
        options: Options of the named backend.
    """

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)


def section(vllm_config: Any) -> object | None:
    """What stands under `dsv4`; None where the user does not want dsv4core."""
    additional = vllm_config.additional_config
    return additional.get(KEY) if isinstance(additional, dict) else None


def parse(given: object) -> AdapterOptions:
    """Read the section.

    Raises:
        ConfigError: It is no mapping, has an unknown key, or a value of the wrong type.
    """
    names = [own.name for own in fields(AdapterOptions)]
    if not isinstance(given, dict):
        raise ConfigError(f'additional_config["dsv4"]={given!r} is no mapping; write {{"backend": "NAME"}}.')
    unknown = sorted(set(given).difference(names))
    if unknown:
        raise ConfigError(
            f'additional_config["dsv4"] has no key {unknown[0]!r}; its keys are {", ".join(names)}.'
        )
    backend, options = given.get("backend"), given.get("options", {})
    if not (isinstance(backend, str) and backend):
        raise ConfigError(
            f'additional_config["dsv4"]["backend"]={backend!r} is no name; write "auto" or one.'
        )
    if not isinstance(options, dict):
        raise ConfigError(
            f'additional_config["dsv4"]["options"]={options!r} is no mapping; write {{"NAME": VALUE}}.'
        )
    return AdapterOptions(backend, options)
