"""`dsv4 new NAME`: a distribution with a backend that installs, is listed and conforms as it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dsv4core.api import ConfigError
from dsv4core.cli.output import show_json, show_line
from dsv4core.framework.discovery import discover
from dsv4core.framework.known import KNOWN_BACKENDS

TEMPLATE = Path(__file__).parent.parent / "template"
"""A whole distribution named acme; that name is what changes."""


def new(words: Sequence[str]) -> int:
    """Write the distribution `dsv4-plugin-NAME` into the current folder; the result is the exit code.

    Args:
        words: The name, and perhaps `json=true`.

    Raises:
        ConfigError: The name is missing, taken or no name, or the folder is there already.
    """
    names = [word for word in words if word != "json=true"]
    if len(names) != 1:
        raise ConfigError(
            f"dsv4 new takes one name, and was given {' '.join(names) or 'none'}; write dsv4 new NAME."
        )
    name = names[0]
    _check_name(name)
    folder = Path(f"dsv4-plugin-{name.replace('_', '-')}")
    files = write_backend(name, folder)
    if "json=true" in words:
        show_json({"backend": name, "folder": str(folder), "files": files})
        return 0
    show_line(f"{folder}: {len(files)} files. What to do next:\n")
    for line in (f"cd {folder}", 'pip install -e ".[test]"', "dsv4 plugins", f"dsv4 check {name}"):
        show_line(f"  {line}")
    return 0


def write_backend(name: str, folder: Path) -> list[str]:
    """Write the distribution of a backend.

    Args:
        name: The backend.
        folder: A new folder.

    Returns:
        The files, relative to the folder.

    Raises:
        ConfigError: The folder is there already.
    """
    if folder.exists():
        raise ConfigError(f"{folder} is there already; remove it, or work in another folder.")
    names = {"dsv4-plugin-acme": folder.name, "acme": name}
    files = []
    for source in sorted(path for path in TEMPLATE.rglob("*") if _belongs(path)):
        relative = str(source.relative_to(TEMPLATE)).replace("acme", name)
        target = folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8")
        text = re.sub("|".join(names), lambda match: names[match[0]], text)
        target.write_text(text, encoding="utf-8")
        files.append(relative)
    return files


def _belongs(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ConfigError(
            f"{name!r} is no name for a backend; use small letters, digits and _, as in acme_npu."
        )
    if name in {"auto", *discover(), *KNOWN_BACKENDS}:
        raise ConfigError(f"A backend named {name!r} is there already; choose another name.")
