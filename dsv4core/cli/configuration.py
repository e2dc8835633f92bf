"""The configuration of a command line."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4core.api import BackendOptions, BackendUnavailable, PluginError
from dsv4core.config import DSV4Config
from dsv4core.hydra import chosen_backend, compose


def configuration(overrides: Sequence[str]) -> DSV4Config:
    """The configuration, even where the named backend cannot be loaded: selection then says why.

    Raises:
        ConfigError: An override is malformed, names an unknown key, or has an impossible value.
    """
    try:
        return compose(overrides)
    except (BackendUnavailable, PluginError):
        config = compose(
            [text for text in overrides if not text.lstrip("+").startswith(("backend=", "backend."))]
        )
        config.backend = BackendOptions(name=chosen_backend(overrides))
        return config
