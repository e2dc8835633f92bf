"""Prints tables and texts of the commands."""

from __future__ import annotations

from rich.console import Console, RenderableType


def show(*renderables: RenderableType) -> None:
    """Print on stdout. Values are never read as markup: a path may hold `[`."""
    console = Console(markup=False, highlight=False)
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable, soft_wrap=isinstance(renderable, str))
    print(capture.get(), end="")  # rich's own printing would turn a closed pipe into exit code 1
