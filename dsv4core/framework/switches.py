"""The two environment variables that dsv4core reads: they switch off plugins, or their isolation."""

from __future__ import annotations

import os

from dsv4core.framework.wording import near_miss, warn_once

SWITCHES = ("DSV4_DISABLE", "DSV4_STRICT")


def strict() -> bool:
    """Whether `DSV4_STRICT=1` asks for original exceptions instead of isolated ones."""
    return os.environ.get("DSV4_STRICT", "").lower() not in ("", "0", "false", "no", "off")


def disabled() -> frozenset[str]:
    """The backends and distributions that `DSV4_DISABLE` names, separated by commas."""
    return frozenset(os.environ.get("DSV4_DISABLE", "").replace(" ", "").split(",")) - {""}


def warn_about_unknown_switches() -> None:
    """Warn about each variable `DSV4_…` that nothing reads: a misspelt switch, or hoped to be an option."""
    for name in sorted(os.environ):
        if name.startswith("DSV4_") and name not in SWITCHES:
            near = near_miss(name, SWITCHES)
            advice = f"Did you mean {near}?" if near else "Options are keys of the configuration."
            warn_once(f"The environment variable {name} changes nothing. {advice}")
