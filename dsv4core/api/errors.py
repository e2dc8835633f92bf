"""The errors that a user can cause or meet. Each text says what was asked, why it cannot be, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4core.api.selection import Decision, Reason


class DSV4Error(Exception):
    """Base of all errors that carry a sentence for the user; the command line prints it and exits with 2."""


class ConfigError(DSV4Error):
    """A configuration value is unknown, malformed or contradicts another one."""


class CheckpointError(DSV4Error):
    """A checkpoint cannot be read, or its tensors are missing, extra, cut short or misshapen."""


class WeightError(CheckpointError):
    """A weight was read, but its values cannot be used (NaN, infinite scale)."""


class CacheError(DSV4Error):
    """A cache tensor, block table or length does not fit the format and the pool it is used with."""


class PluginError(DSV4Error):
    """A backend cannot be loaded or breaks the contract.

    Attributes:
        reason: Why, and what to do.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class BackendUnavailable(DSV4Error):
    """The asked backend cannot run this request, or `auto` found none that can.

    Attributes:
        decisions: What was found about each backend that was looked at.
    """

    def __init__(self, message: str, decisions: tuple[Decision, ...] = ()) -> None:
        super().__init__(message)
        self.decisions = decisions
