"""What a shell may complete a `dsv4` line to. No torch and no Hydra: somebody waits at the prompt."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from typing import Any

from dsv4core.api import BackendOptions, PluginError
from dsv4core.config import AutoOptions, DSV4Config, settable
from dsv4core.framework.discovery import BackendRecord, discover
from dsv4core.framework.manager import load_backend
from dsv4core.presets import PRESET_GROUPS, presets

DEVICES = ("auto", "cpu", "cuda")


def complete(words: Sequence[str], commands: Sequence[str]) -> list[str]:
    """The candidates for the last of `words`, which follow `dsv4` and of which the last may be empty.

    Args:
        words: The words of the line.
        commands: The commands that there are.
    """
    *before, last = words
    if not before:
        return _starting(last, [*commands, "--help", "--version"])
    if before[0] == "plugins":
        return _starting(last, ["--json", "--help"])
    if before[0] not in commands or before[0] == "new":
        return []
    records = discover()
    if before[0] == "check":
        before = ["check", *(f"backend={word}" for word in before[1:] if word in records), *before[1:]]
        if len(before) == 1:
            return _starting(last, [*records, "--help"])
    key, equals, value = last.partition("=")
    if key == "checkpoint" and equals:
        return sorted(f"checkpoint={path}" for path in glob(f"{value}*{os.sep}"))
    keys = _keys(before, records)
    if equals:
        return _starting(last, [f"{key}={choice}" for choice in _values(key, keys, records)])
    if before[0] == "check":
        own = [f"{name}=" for name in keys if name in ("device", "dtype") or name.startswith("backend.")]
        return _starting(last, [*own, "--json", "--help", "--only", "--quick", "--deadline"])
    groups = [f"{group}=" for group in ("backend", *PRESET_GROUPS)]
    others = {"request.": ("explain", "bench"), "bench.": ("bench",)}
    own = [
        f"{name}="
        for name in keys
        if all(before[0] in commands or not name.startswith(prefix) for prefix, commands in others.items())
    ]
    return _starting(last, [*groups, *own, "--json", "--help", *(["--prompt"] if before[0] == "run" else [])])


def _starting(prefix: str, candidates: Sequence[str]) -> list[str]:
    return sorted(candidate for candidate in candidates if candidate.startswith(prefix))


def _keys(before: Sequence[str], records: Mapping[str, BackendRecord]) -> dict[str, Any]:
    """Keys that can be set, with their fields; those of the backend that the line names among them."""
    names = [word.partition("=")[2] for word in before if word.startswith("backend=")]
    return settable(DSV4Config(backend=_options(names[-1] if names else "auto", records)))


def _options(name: str, records: Mapping[str, BackendRecord]) -> BackendOptions:
    if name == "auto" or name not in records:
        return AutoOptions() if name == "auto" else BackendOptions(name)
    try:
        return load_backend(records[name]).info.options(name=name)
    except PluginError:
        return BackendOptions(name)


def _values(key: str, keys: Mapping[str, Any], records: Mapping[str, BackendRecord]) -> Iterator[str]:
    if key == "backend":
        yield from ("auto", *records)
    elif key == "device":
        yield from DEVICES
    elif key in PRESET_GROUPS:
        yield from presets(key)
    elif key in keys:
        yield from keys[key].metadata.get("choices", ())
        yield from ("true", "false") if keys[key].type in (bool, "bool") else ()
