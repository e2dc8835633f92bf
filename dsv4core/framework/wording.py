"""How exceptions, misspelt names and warnings are put into words."""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Iterable
from functools import cache
from traceback import walk_tb

logger = logging.getLogger("dsv4core")


def one_line(error: BaseException) -> str:
    """An exception as `Type: text` on one line, without a full stop."""
    try:
        shown = "".join(letter if letter.isprintable() else " " for letter in str(error))
        text = " ".join(shown.split()).rstrip(".")
    except Exception:  # somebody else's __str__
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def with_origin(error: BaseException, package: str) -> str:
    """An exception on one line, with the last line of `package` that it came through."""
    origin = ""
    for frame, line in walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module == package or module.startswith(f"{package}."):
            origin = f" ({frame.f_code.co_filename}, line {line})"
    return one_line(error) + origin


def add_note(text: str, error: BaseException) -> None:
    """Add a line to an exception's traceback; Python before 3.11 keeps it, and does not show it."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        error.__dict__["__notes__"] = [*getattr(error, "__notes__", ()), text]


def near_miss(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that was probably meant by `name`, or None."""
    # 0.65 takes 'rum' for 'run' (0.67), but not 'nope' for 'hopper' (0.6).
    return next(iter(difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.65)), None)


@cache
def warn_once(text: str) -> None:
    """Log a warning, the first time that this process meets it."""
    logger.warning("%s", text)
