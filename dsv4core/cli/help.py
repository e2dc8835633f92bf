"""The help of `dsv4`, made from the configuration's own help texts and the installed backends."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from dsv4core.api import BackendOptions
from dsv4core.config import AutoOptions, DSV4Config
from dsv4core.framework.discovery import discover
from dsv4core.framework.manager import UnusableBackend, load_backend

USAGE = """\
dsv4: the attention layer of DeepSeek-V4 on any accelerator

  dsv4 run [key=value ...] [--prompt TEXT] [--json]   run a checkpoint's attention layers
  dsv4 explain [key=value ...] [--json]               which backend would run here, and why
  dsv4 plugins [--json]                               which backends there are

Examples
  dsv4 run verify=true
  dsv4 run --prompt "Attention, please." decode=32
  dsv4 run prompt=@speech.txt workload=long
  dsv4 explain backend=flashmla model=v4_flash kv_cache_dtype=fp8
"""


def print_help() -> None:
    """Print commands, examples, keys, and the installed backends with their options."""
    print(USAGE)
    console = Console(markup=False, highlight=False)
    console.print("Keys (also workload=quick or long: presets of prefill, decode and batch)")
    console.print(_table(_key_rows("", fields(DSV4Config))))
    console.print("\nBackends")
    console.print(_table(_backend_rows()))


def _table(rows: Iterable[tuple[str, str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    for row in rows:
        table.add_row(*row)
    return table


def _key_rows(prefix: str, keys: Iterable[Field[Any]]) -> list[tuple[str, str, str]]:
    return [(prefix + key.name, _default(key), key.metadata.get("help", "")) for key in keys]


def _default(key: Field[Any]) -> str:
    value = key.default if key.default_factory is MISSING else key.default_factory()
    value = getattr(value, "name", value)
    if value is MISSING:
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _backend_rows() -> list[tuple[str, str, str]]:
    rows = [("auto", "", "the first of an order that can run"), *_option_rows(AutoOptions)]
    for name, record in discover().items():
        try:
            info = load_backend(record).info
        except UnusableBackend as error:
            rows.append((name, "", str(error)))
        else:
            rows += [(name, "", info.summary), *_option_rows(info.options)]
    return rows


def _option_rows(options: type[BackendOptions]) -> list[tuple[str, str, str]]:
    return _key_rows("  backend.", [field for field in fields(options) if field.name != "name"])
