"""The command line's way to fill a `DSV4Config`. Nothing else in dsv4core imports Hydra."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import Field
from io import StringIO
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from dsv4core.api import BackendOptions, BackendUnavailable, ConfigError, PluginError
from dsv4core.config import AutoOptions, DSV4Config, leaves, read_prompt
from dsv4core.framework.discovery import BackendRecord, discover
from dsv4core.framework.known import absent_reason
from dsv4core.framework.manager import broken, load_backend
from dsv4core.framework.switches import strict
from dsv4core.framework.wording import near_miss, one_line
from dsv4core.presets import CONF, PRESET_GROUPS, presets

logger = logging.getLogger(__name__)

__all__ = ["chosen_backend", "completion_script", "compose", "register_configs"]

# Hydra 1.3 wants version_base; 1.4 warns about it, and about a config that is stored twice.
_HYDRA_1_3 = hydra.__version__.startswith("1.3.")
_INITIALIZE: dict[str, Any] = {"version_base": "1.3"} if _HYDRA_1_3 else {}
_STORE: dict[str, Any] = {"provider": "dsv4core"} if _HYDRA_1_3 else {"provider": "dsv4core", "replace": True}


def register_configs(group: str = "backend") -> None:
    """Make the schema `dsv4_config` and every installed backend's options known to Hydra.

    Another application calls it before `hydra.main`, with the group of the backend there. With `dsv4/backend`
    the schema is in the group `dsv4`, and the defaults `dsv4: dsv4_config` and `dsv4/backend: auto` make a
    `DSV4Config` of its key `dsv4`. A backend that cannot be loaded is left out with a warning.

    Raises:
        PluginError: With `DSV4_STRICT=1`: a backend cannot be loaded.
    """
    _store_root(group.rpartition("/")[0])
    _store(group, AutoOptions())
    for record in discover().values():
        try:
            _store(group, _default_options(record))
        except PluginError as error:
            if strict() and error.reason.code != "disabled":
                raise
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
    options = _load_options(_chosen(parsed), _disabled(parsed))
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


def completion_script(shell: str) -> str:
    """What makes a shell ask `dsv4 -sc query=SHELL` for completions: Hydra's own script, for `eval`.

    Raises:
        ConfigError: Hydra has none for that shell.
    """
    plugins = cast(list[Any], Plugins.instance().discover(CompletionPlugin))
    found = {plugin.provides(): plugin for plugin in plugins}
    if shell not in found:
        raise ConfigError(f"-sc install={shell} is not known; the shells are {', '.join(sorted(found))}.")
    script = StringIO()
    with redirect_stdout(script):
        found[shell](config_loader=None).install()
    return script.getvalue()


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


def _disabled(overrides: Sequence[Override]) -> list[str]:
    values = [override.value() for override in overrides if override.key_or_group == "plugins.disable"]
    return [str(name) for name in values[-1]] if values and isinstance(values[-1], list) else []


def _load_options(name: str, disable: Sequence[str]) -> BackendOptions:
    """The default options of a backend."""
    if name == "auto":
        return AutoOptions()
    records = discover(disable)
    if name not in records:
        raise BackendUnavailable(str(absent_reason(name, records)))
    return _default_options(records[name])


def _default_options(record: BackendRecord) -> BackendOptions:
    options = load_backend(record).info.options(name=record.name)
    try:
        OmegaConf.structured(options)
    except OmegaConfBaseException as error:
        raise broken(record, f"has options that Hydra cannot hold: {one_line(error)}") from error
    return options


def _keys(options: BackendOptions) -> dict[str, Field[Any]]:
    """The keys that may be set, with their fields."""
    config = DSV4Config(backend=options)
    return {name: own for name, own, _ in leaves(config) if name not in ("backend.name", "model.name")}


def _check(override: Override, keys: dict[str, Field[Any]]) -> None:
    """Refuse what Hydra would ignore (`+typo=1` and `hydra.x=1` change nothing) or explain at length."""
    key = override.get_key_element().lstrip("+")
    if key in PRESET_GROUPS and override.value() not in presets(key):
        names = ", ".join(presets(key))
        raise ConfigError(f"{key}={override.value()} is not known; the names are {names}.")
    if key in PRESET_GROUPS or key == "backend":
        return
    field = _field(key, keys)
    if field is not None:
        return _check_shape(key, field, override.value())
    raise ConfigError(f"{key!r} is not {_advice(key, sorted({*keys, *PRESET_GROUPS, 'backend'}))}")


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


_LISTS = {"list[int]": ("numbers", "[0,2]", (int,)), "list[str]": ("names", "[a,b]", (object,))}


def _check_shape(key: str, field: Field[Any], value: object) -> None:
    """Refuse what is no list or mapping where one is due: Hydra would say so in the words of its classes."""
    declared = str(field.type)
    if declared.startswith("dict["):
        if key.rpartition(".")[2] == field.name and not isinstance(value, dict):
            raise ConfigError(f"{key}={value} has no keys; set one of them, as in '{key}.KEY=VALUE'.")
        declared = declared.partition(", ")[2][:-1]
    optional = declared.endswith(" | None")
    items, example, types = _LISTS.get(declared.removesuffix(" | None"), ("", "", ()))
    if not items or (value is None and optional) or isinstance(value, dict):
        return
    if not (isinstance(value, list) and all(isinstance(one, types) for one in value)):
        advice = f"write '{key}={example}'" + (", or null" if optional else "")
        raise ConfigError(f"{key}={value} is no list of {items}; {advice}.")


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
