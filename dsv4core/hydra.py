"""The command line's way to fill a `DSV4Config`. Nothing else in dsv4core imports Hydra."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from dsv4core.api import BackendOptions, BackendUnavailable, ConfigError, PluginError
from dsv4core.config import AutoOptions, DSV4Config, read_prompt
from dsv4core.framework.discovery import absent_reason, discover
from dsv4core.framework.manager import broken, load_backend, one_line

logger = logging.getLogger(__name__)

CONF = Path(__file__).parent / "conf"

# Hydra 1.3 wants version_base; 1.4 warns about it, and about a config that is stored twice.
_HYDRA_1_3 = hydra.__version__.startswith("1.3.")
_INITIALIZE: dict[str, Any] = {"version_base": "1.3"} if _HYDRA_1_3 else {}
_STORE: dict[str, Any] = {"provider": "dsv4core"} if _HYDRA_1_3 else {"provider": "dsv4core", "replace": True}


def register_configs(group: str = "backend") -> None:
    """Make the schema `dsv4_config` and every installed backend's options known to Hydra.

    Another application calls it before `hydra.main`, with the group of the backend there. With `dsv4/backend`
    the schema is in the group `dsv4`, and the defaults `dsv4: dsv4_config` and `dsv4/backend: auto` make a
    `DSV4Config` of its key `dsv4`. A backend that cannot be loaded is left out with a warning.
    """
    _store_root(group.rpartition("/")[0])
    _store(group, AutoOptions())
    for name in discover():
        try:
            _store(group, _load_options(name))
        except PluginError as error:
            logger.warning("%s", error)


def compose(overrides: Sequence[str] = ()) -> DSV4Config:
    """The configuration that `conf/config.yaml` and `overrides` (`key=value`) make.

    The value of `prompt` is taken word for word, and read from the file where it is `@FILE`. Only the chosen
    backend is loaded. Inside another Hydra application use `register_configs` instead.

    Raises:
        ConfigError: An override is malformed, names an unknown key, or has an impossible value.
        BackendUnavailable: The chosen backend is not installed.
        PluginError: The chosen backend cannot be loaded.
    """
    prompts = [text.partition("=")[2] for text in overrides if text.startswith("prompt=")]
    texts = [text for text in overrides if not text.startswith("prompt=")]
    parsed = [_parse(text) for text in texts]
    options = _load_options(_chosen(parsed))
    keys = _keys(options)
    for override in parsed:
        _check(override, keys)
    _store_root("")
    _store("backend", options)
    config = _compose(texts, keys)
    if prompts:
        config.prompt = read_prompt(prompts[-1])
    return config


def chosen_backend(overrides: Sequence[str]) -> str:
    """The backend that `overrides` name, `auto` where they name none.

    Raises:
        ConfigError: An override is malformed.
    """
    return _chosen([_parse(text) for text in overrides if not text.startswith("prompt=")])


def _parse(text: str) -> Override:
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


def _chosen(overrides: Sequence[Override]) -> str:
    names = [override.value() for override in overrides if override.key_or_group == "backend"]
    name = names[-1] if names else "auto"
    if not isinstance(name, str):
        raise ConfigError("backend takes a name; `dsv4 plugins` lists them.")
    return name


def _load_options(name: str) -> BackendOptions:
    """The default options of a backend."""
    if name == "auto":
        return AutoOptions()
    records = discover()
    if name not in records:
        raise BackendUnavailable(str(absent_reason(name, records)))
    backend = load_backend(records[name])
    options = backend.info.options(name=name)
    try:
        OmegaConf.structured(options)
    except OmegaConfBaseException as error:
        raise broken(backend, f"has options that Hydra cannot hold: {one_line(error)}") from error
    return options


def _keys(options: BackendOptions) -> dict[str, Field[Any]]:
    """The keys that may be set, with their fields."""
    groups = ("backend", "model")
    keys = {field.name: field for field in fields(DSV4Config) if field.name not in groups}
    return keys | {f"backend.{field.name}": field for field in fields(options) if field.name != "name"}


def _check(override: Override, keys: dict[str, Field[Any]]) -> None:
    """Refuse what Hydra would ignore (`+typo=1` and `hydra.x=1` change nothing) or explain at length."""
    key = override.get_key_element().lstrip("+")
    presets = {group: _presets(group) for group in ("model", "workload")}
    if key in presets and override.value() not in presets[key]:
        names = ", ".join(presets[key])
        raise ConfigError(f"{key}={override.value()} is not known; the names are {names}.")
    if key == "layers":
        _check_layers(override.value())
    if key in presets or key == "backend" or _field(key, keys) is not None:
        return
    own = sorted(name for name in keys if name.startswith("backend."))
    if key.startswith("backend."):
        raise ConfigError(f"{key!r} is not an option of this backend; it takes {', '.join(own) or 'none'}.")
    known = sorted({*keys, *presets, "backend"}.difference(own))
    near = difflib.get_close_matches(key, known, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}."
    raise ConfigError(f"{key!r} is not a key; {advice}")


def _check_layers(value: object) -> None:
    numbers = value if isinstance(value, list) else [value]
    if value is not None and (numbers is not value or not all(isinstance(number, int) for number in numbers)):
        raise ConfigError(
            f"layers={value} is no list of layer numbers; write 'layers=[0,2]', or null for all."
        )


def _presets(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _field(key: str | None, keys: dict[str, Field[Any]]) -> Field[Any] | None:
    """The field that `key` is, or lies in (`backend.order.cuda` in `backend.order`)."""
    parts = (key or "").split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((keys[prefix] for prefix in prefixes if prefix in keys), None)


def _compose(overrides: list[str], keys: dict[str, Field[Any]]) -> DSV4Config:
    try:
        with hydra.initialize_config_dir(config_dir=str(CONF.resolve()), **_INITIALIZE):
            composed = hydra.compose("config", overrides=overrides)
        return cast(DSV4Config, OmegaConf.to_object(composed))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_explain(error, keys)) from error


def _explain(error: Exception, keys: dict[str, Field[Any]]) -> str:
    """One line about an error of Hydra's, naming the key and its type where OmegaConf knows the key."""
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {str(error).splitlines()[0].rstrip('.')}."
    cause = error.__cause__
    if isinstance(cause, ValidationError) and (field := _field(cause.full_key, keys)):
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        return f"{cause.full_key} takes {kind}: {str(cause).splitlines()[0].rstrip('.')}."
    return f"{' '.join(str(error).split()).rstrip('.')}."


def _store_root(group: str) -> None:
    root = OmegaConf.structured(DSV4Config)
    root.backend = "???"  # the default options' fields would mix with those of the chosen backend
    ConfigStore.instance().store(group=group or None, name="dsv4_config", node=root, **_STORE)


def _store(group: str, options: BackendOptions) -> None:
    ConfigStore.instance().store(group=group, name=options.name, node=options, **_STORE)
