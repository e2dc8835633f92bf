"""The help of `dsv4`, made from the configuration's own help texts and the installed backends."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import Field
from typing import Any

from rich.table import Table

from dsv4core.api import BackendOptions, PluginError
from dsv4core.cli.output import show
from dsv4core.config import AutoOptions, DSV4Config, leaves
from dsv4core.framework.discovery import discover
from dsv4core.framework.manager import load_backend, tolerable
from dsv4core.presets import PRESET_GROUPS, presets

USAGE = """\
dsv4: the attention layer of DeepSeek-V4 on any accelerator

  dsv4 run [key=value ...] [--prompt TEXT] [--json]   run a checkpoint's attention layers
  dsv4 explain [key=value ...] [--json]               which backend would run here, and why
  dsv4 plugins [--json]                               which backends there are
  dsv4 bench [key=value ...] [--json]                 how fast operations and layers are
  dsv4 calibrate --out FILE [key=value ...] [--prompt TEXT] [--json]
                                                      measure scales for plain FP8 caches
  dsv4 new NAME                                       begin a backend of your own
  dsv4 check NAME [--only TEXT] [--quick] [--deadline SECONDS] [--json]
                                                      whether a backend does what it has to

Examples
  dsv4 run verify=true
  dsv4 run --prompt "Attention, please." decode=32
  dsv4 run prompt=@speech.txt workload=long
  dsv4 explain backend=flashmla model=v4_flash kv_cache_dtype=fp8
  dsv4 explain request.arch=sm_100 request.tensor_parallel=4
  dsv4 calibrate checkpoint=DIR prompt=@speech.txt --out scales.json
  dsv4 run checkpoint=DIR kv_cache_dtype=fp8_e4m3 scales=scales.json
  dsv4 check reference --quick
  dsv4 bench backend=reference bench.peers=[torch] bench.tokens=[1,64] bench.plot=plots
"""

AFTERWORD = """
Switches in the environment
  DSV4_DISABLE=NAME,...    load none of these backends or distributions
  DSV4_STRICT=1            raise what a plugin raises, with its traceback

Completion in bash, zsh or fish
  eval "$(dsv4 -sc install=bash)"
"""


def print_help() -> None:
    """Print commands, examples, keys, and the installed backends with their options."""
    backends, config = _backend_rows(), DSV4Config()
    keys = _rows(config, "", without=("backend.", "model.", "request.", "bench."))
    show(USAGE, "Keys", _table([*_group_rows(config), *keys]))
    show("\nKeys of dsv4 explain: what another machine or an engine would ask")
    show(_table(_rows(config.request, "request.")), "\nKeys of dsv4 bench: every combination is measured")
    show(_table(_rows(config.bench, "bench.")), "\nBackends", _table(backends), AFTERWORD)


def _table(rows: Iterable[tuple[str, str, str]]) -> Table:
    table = Table("key", "default", box=None, show_header=False, padding=(0, 1, 0, 2))
    table.add_column("about", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _group_rows(config: DSV4Config) -> list[tuple[str, str, str]]:
    groups = {
        "backend": "who computes: auto, or an installed backend's name",
        "model": "preset of the model's sizes, where no checkpoint gives them",
        "workload": "preset of prefill, decode and batch",
        "bench": "preset of what dsv4 bench measures",
    }
    defaults = {
        "backend": config.backend.name,
        "model": config.model.name,
        "workload": "quick",
        "bench": "quick",
    }
    return [
        (name, defaults[name], text + (f": {', '.join(presets(name))}" if name in PRESET_GROUPS else ""))
        for name, text in groups.items()
    ]


def _rows(options: object, prefix: str, without: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    return [
        (prefix + name, _shown(value), _about(own))
        for name, own, value in leaves(options)
        if not name.startswith(without)
    ]


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _about(own: Field[Any]) -> str:
    choices = own.metadata.get("choices", ())
    return own.metadata.get("help", "") + (f": {', '.join(map(str, choices))}" if choices else "")


def _backend_rows() -> list[tuple[str, str, str]]:
    rows = [("auto", "", "the first of an order that can run"), *_option_rows(AutoOptions())]
    for name, record in discover().items():
        try:
            info = load_backend(record).info
        except PluginError as error:
            if not tolerable(error):
                raise
            rows.append((name, "", str(error)))
        else:
            rows += [(name, "", info.summary), *_option_rows(info.options(name=name))]
    return rows


def _option_rows(options: BackendOptions) -> list[tuple[str, str, str]]:
    return _rows(options, "  backend.", without=("name",))
