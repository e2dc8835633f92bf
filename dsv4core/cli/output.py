"""Prints results on stdout, and keeps everything else away from it."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

_results: TextIO | None = None


@contextmanager
def results_apart() -> Iterator[None]:
    """Let only `show` and `show_json` reach stdout.

    What anybody else prints, as plugins do while they are imported and kernel libraries while they compile,
    goes to stderr: a program that reads JSON from stdout must not meet it.
    """
    global _results
    with _stream_apart(sys.stdout) as _results, redirect_stdout(sys.stderr):
        try:
            yield
            _results.flush()
        finally:
            _results = None


@contextmanager
def _stream_apart(stream: TextIO) -> Iterator[TextIO]:
    """Another way to where `stream` leads, while its descriptor, which C libraries use, leads to stderr."""
    try:
        number = stream.fileno()
    except io.UnsupportedOperation:  # no file: a test, a notebook
        yield stream
        return
    stream.flush()
    with os.fdopen(os.dup(number), "w", encoding=stream.encoding) as apart:
        os.dup2(2, number)
        try:
            yield apart
        finally:
            os.dup2(apart.fileno(), number)


def show(*renderables: RenderableType) -> None:
    """Print tables and texts. Values are never read as markup: a path may hold `[`."""
    from rich.console import Console

    console = Console(file=_results or sys.stdout, markup=False, highlight=False)
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable, soft_wrap=isinstance(renderable, str))
    print(capture.get(), end="", file=_results)  # rich's own printing would make a closed pipe exit code 1


def show_line(text: str) -> None:
    """Print one line as it is, without loading rich."""
    print(text, file=_results)


def show_json(value: Any) -> None:
    """Print data. Sets become sorted lists, and what JSON does not know its text."""
    print(json.dumps(value, indent=2, default=_plain), file=_results)


def show_json_line(value: Any) -> None:
    """Print data as one line, at once: somebody may be reading along."""
    print(json.dumps(value, default=_plain), file=_results, flush=True)


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
