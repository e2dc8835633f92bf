"""The command line's way to fill a `DSV4Config`. Nothing else in dsv4core imports Hydra."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import Field
from io import StringIO
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from dsv4core.api import BackendOptions, BackendUnavailable, ConfigError, DSV4Error, PluginError
from dsv4core.config import AutoOptions, DSV4Config, read_prompt, settable
from dsv4core.framework.discovery import BackendRecord, discover
from dsv4core.framework.known import absent_reason
from dsv4core.framework.manager import isolated, load_backend, tolerable
from dsv4core.framework.wording import one_line
from dsv4core.hydra.overrides import check, chosen, declared_type, disabled, expand_sweeps, parse
from dsv4core.presets import CONF

logger = logging.getLogger(__name__)

__all__ = ["chosen_backend", "completion_script", "compose", "expand_sweeps", "register_configs"]

# Hydra 1.3 wants version_base; 1.4 warns about it, and about a config that is stored twice.
_HYDRA_1_3 = hydra.__version__.startswith("1.3.")
_INITIALIZE: dict[str, Any] = {"version_base": "1.3"} if _HYDRA_1_3 else {}
_STORE: dict[str, Any] = {"provider": "dsv4core"} if _HYDRA_1_3 else {"provider": "dsv4core", "replace": True}
_ONE_AT_A_TIME = threading.Lock()  # Hydra composes in a singleton


def register_configs(group: str = "backend", disable: Iterable[str] = ()) -> None:
    """Make the schema `dsv4_config` and every installed backend's options known to Hydra.

    Another application calls it before `hydra.main`. With `dsv4/backend` the schema is in the group `dsv4`,
    and the defaults `dsv4: dsv4_config` and `dsv4/backend: auto` make a `DSV4Config` of its key `dsv4`. A
    backend that cannot be loaded is left out with a warning.

    Args:
        group: The group of the backends in that application.
        disable: Backends and distributions that are not loaded, besides those of `DSV4_DISABLE`.

    Raises:
        PluginError: With `DSV4_STRICT=1`: a backend cannot be loaded.
    """
    _store_root(group.rpartition("/")[0])
    _store(group, AutoOptions())
    for record in discover(disable).values():
        if record.problem is not None and record.problem.code == "disabled":
            continue
        try:
            _store(group, _default_options(record))
        except PluginError as error:
            if not tolerable(error):
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
    parsed = [parse(text) for text in overrides if not text.startswith("prompt=")]
    options = _load_options(chosen(parsed), disabled(parsed))
    keys = settable(DSV4Config(backend=options))
    texts = [check(override, keys) for override in parsed]
    with _ONE_AT_A_TIME:
        _store_root("")
        _store("backend", options)
        config = _compose(texts, keys, options.name)
    if prompts:
        config.prompt = read_prompt(prompts[-1])
    return config


def chosen_backend(overrides: Sequence[str]) -> str:
    """The backend that `overrides` name, `auto` where they name none.

    Raises:
        ConfigError: An override is malformed.
    """
    return chosen([parse(text) for text in overrides if not text.startswith("prompt=")])


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
    with isolated(record, "broken", f"{record.title} has options that Hydra cannot hold:"):
        OmegaConf.structured(options)
    return options


def _compose(overrides: Sequence[str], keys: dict[str, Field[Any]], backend: str) -> DSV4Config:
    if GlobalHydra.instance().is_initialized():
        raise ConfigError(
            "compose cannot be called inside a Hydra application; call register_configs before hydra.main, "
            "and take the configuration that Hydra hands over."
        )
    try:
        with hydra.initialize_config_dir(config_dir=str(CONF.resolve()), **_INITIALIZE):
            composed = hydra.compose("config", overrides=list(overrides))
        return cast(DSV4Config, OmegaConf.to_object(composed))
    except DSV4Error:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, keys)) from error
    except Exception as error:  # a plugin's options check themselves in their own way
        text = " ".join(str(error).split()) if isinstance(error, ValueError) else one_line(error)
        raise ConfigError(f"backend={backend} refuses its options: {text.rstrip('.')}.") from error


def _explain(error: Exception, keys: dict[str, Field[Any]]) -> str:
    """One line about an error of Hydra's, naming the key and its type where OmegaConf knows the key."""
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {str(error).splitlines()[0].rstrip('.')}."
    cause = error.__cause__
    if isinstance(cause, ValidationError) and (declared := declared_type(cause.full_key or "", keys)):
        return f"{cause.full_key} takes {declared}: {str(cause).splitlines()[0].rstrip('.')}."
    return f"{' '.join(str(error).split()).rstrip('.')}."


def _store_root(group: str) -> None:
    root = OmegaConf.structured(DSV4Config)
    root.backend = "???"  # the default options' fields would mix with those of the chosen backend
    ConfigStore.instance().store(group=group or None, name="dsv4_config", node=root, **_STORE)


def _store(group: str, options: BackendOptions) -> None:
    ConfigStore.instance().store(group=group, name=options.name, node=options, **_STORE)
