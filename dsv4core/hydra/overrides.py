"""What a user writes as `key=value`: parsed by Hydra's grammar, and checked before Hydra composes.

Hydra would ignore some mistakes (`+typo=1` and `hydra.x=1` change nothing here) and explain others at length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import Field
from itertools import product
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from dsv4core.api import ConfigError
from dsv4core.framework.wording import near_miss
from dsv4core.presets import CONF, PRESET_GROUPS, presets

GROUPS = ("backend", *PRESET_GROUPS)
LISTS = {"list[int]": ("numbers", "[0,2]", (int,)), "list[str]": ("names", "[a,b]", (object,))}


def parse(text: str) -> Override:
    """Parse one override.

    Raises:
        ConfigError: It is malformed, takes a key away, or gives several values.
    """
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        advice = "quote a value that has special characters, as in 'key=\"a, b\"'"
        if "=" not in text:
            advice = "write key=value; free text goes after --prompt"
        raise ConfigError(f"{text!r} cannot be read; {advice}.") from error
    if override.is_delete():
        raise ConfigError(f"{text!r} would take a key away, and every key has a value; leave it out.")
    if override.is_sweep_override():
        raise ConfigError(f"{text!r} gives several values; give one, or a list as key=[a,b].")
    return override


def expand_sweeps(texts: Sequence[str]) -> list[list[str]]:
    """Every combination of the values that overrides give: `key=a,b`, `range(1,4)`, `choice(a,b)`.

    A chosen `bench` preset may give more of them (its `hydra.sweeper.params`), for keys that no override has.

    Raises:
        ConfigError: An override is malformed.
    """
    expanded = []
    for own in _combinations(texts):
        given = {text.partition("=")[0].lstrip("+") for text in own}
        swept = [f"{key}={values}" for key, values in _preset_sweeps(own).items() if key not in given]
        expanded += [[*own, *more] for more in _combinations(swept)]
    return expanded


def _combinations(texts: Sequence[str]) -> list[list[str]]:
    values: list[list[str]] = []
    for text in texts:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            parse(text)  # says what is wrong with it
            raise
        if override.is_sweep_override():
            key = override.get_key_element()
            values.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            values.append([text])
    return [list(combination) for combination in product(*values)]


def _preset_sweeps(texts: Sequence[str]) -> dict[str, str]:
    """What the chosen `bench` preset sweeps by itself: nothing, if there is no such preset."""
    names = [text.partition("=")[2] for text in texts if text.startswith("bench=")]
    if not names or names[-1] not in presets("bench"):
        return {}
    swept = OmegaConf.select(OmegaConf.load(CONF / "bench" / f"{names[-1]}.yaml"), "hydra.sweeper.params")
    return {} if swept is None else dict(swept)


def key_of(override: Override) -> str:
    """The key that an override sets. A plus sign makes no difference: whether a key exists is known here."""
    return override.get_key_element().lstrip("+")


def chosen(overrides: Sequence[Override]) -> str:
    """The backend that is named last, else `auto`.

    Raises:
        ConfigError: It is not a name.
    """
    names = [override.value() for override in overrides if key_of(override) == "backend"]
    name = names[-1] if names else "auto"
    if not isinstance(name, str):
        raise ConfigError("backend takes a name; `dsv4 plugins` lists them.")
    return name


def disabled(overrides: Sequence[Override]) -> list[str]:
    """What `plugins.disable` names: nothing is loaded before that is known."""
    values = [override.value() for override in overrides if key_of(override) == "plugins.disable"]
    return [str(name) for name in values[-1]] if values and isinstance(values[-1], list) else []


def check(override: Override, keys: Mapping[str, Field[Any]]) -> str:
    """The override as Hydra is to have it.

    Args:
        override: What the user wrote.
        keys: The keys that there are, with their fields.

    Raises:
        ConfigError: The key or the preset is unknown, or a list, mapping or value is due and there is none.
    """
    key, value = key_of(override), override.value()
    text = str(override.input_line).lstrip("+")
    if key in PRESET_GROUPS and value not in presets(key):
        raise ConfigError(f"{key}={value} is not known; the names are {', '.join(presets(key))}.")
    if key in GROUPS:
        return text
    declared = declared_type(key, keys)
    if declared is None:
        raise ConfigError(f"{key!r} is not {_advice(key, sorted({*keys, *GROUPS}))}")
    if value == "???":
        raise ConfigError(f"{key}=??? leaves it without a value; give one.")
    _check_shape(key, declared, value)
    return f"++{text}"  # sets an entry of a mapping (backend.order.sm_120) whether it is there or not


def declared_type(key: str, keys: Mapping[str, Field[Any]]) -> str | None:
    """The type of a key, or of an entry of a mapping, as text; None for a key that is not there."""
    if key in keys:
        declared = keys[key].type
        plain = isinstance(declared, type) and "[" not in str(declared)
        text = declared.__name__ if plain else str(declared).replace("typing.", "")  # type: ignore[union-attr]
        return re.sub(r"\b(Dict|List)\[", lambda match: match[0].lower(), text)
    parent = key.rpartition(".")[0]
    mapping = declared_type(parent, keys) if parent in keys else None
    return mapping.partition(", ")[2][:-1] if mapping and mapping.startswith("dict[") else None


def _advice(key: str, known: Sequence[str]) -> str:
    """How the sentence about an unknown key goes on after "is not"."""
    group, dot, _ = key.partition(".")
    own = ", ".join(name for name in known if dot and name.startswith(f"{group}."))
    if group == "backend":
        return f"an option of this backend; it takes {own or 'none'}."
    near = near_miss(key, known)
    if near or own:
        return f"a key; did you mean {near!r}?" if near else f"a key; {group} takes {own}."
    shown = sorted({re.sub(r"\..*", ".*", name) for name in known if not name.startswith("backend.")})
    return f"a key; the keys are {', '.join(shown)}."


def _check_shape(key: str, declared: str, value: object) -> None:
    """Refuse what is no list or mapping where one is due: Hydra would say so in the words of its classes."""
    if declared.startswith("dict[") and not isinstance(value, dict):
        raise ConfigError(f"{key}={value} has no keys; set one of them, as in '{key}.KEY=VALUE'.")
    optional = declared.endswith(" | None")
    items, example, types = LISTS.get(declared.removesuffix(" | None"), ("", "", ()))
    if not items or (value is None and optional):
        return
    if not (isinstance(value, list) and all(isinstance(one, types) for one in value)):
        advice = f"write '{key}={example}'" + (", or null" if optional else "")
        raise ConfigError(f"{key}={value} is no list of {items}; {advice}.")
