"""What the framework costs: starts of processes, and a call of a bound hook.

python benchmarks/framework.py [--out benchmarks/results/cpu/framework.jsonl]

Starts are medians over processes that take turns, so that a slow minute of the machine meets all of them. The
call is `forward_mqa` of a backend that takes six of its eleven arguments, in another order, and does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dsv4core.api import SWA, LayerSpec, Limits, Request
from dsv4core.bench.rows import provenance
from dsv4core.framework.binding import bind_layer
from dsv4core.framework.selection import select
from dsv4core.model.shapes import PRESETS
from dsv4core.testing.fakes import altered, install_backend

MAIN = "import sys; from dsv4core.cli.main import main; sys.exit(main(sys.argv[1:]))"
STARTS: dict[str, tuple[str, ...]] = {
    "python -c pass": ("pass",),
    "import pluggy": ("import pluggy",),
    "import dsv4core": ("import dsv4core",),
    "import dsv4core.api": ("import dsv4core.api",),
    "dsv4 plugins": (MAIN, "plugins"),
    "dsv4 explain": (MAIN, "explain"),
    "completion": (MAIN, "-sc", "query=bash"),
}
ENVIRONMENT = {**os.environ, "COMP_LINE": "dsv4 run backend="}
HEAVY = ("torch", "hydra", "omegaconf")


def start(words: tuple[str, ...]) -> float:
    """Milliseconds from the start of a process to its end."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", *words]
    subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - begin) * 1e3


def imported(words: tuple[str, ...]) -> list[str]:
    """The heavy packages that a program has imported at its end."""
    program, *arguments = words
    report = f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    check = f"import atexit, sys; atexit.register(lambda: {report})"
    command = [sys.executable, "-c", f"{check}\n{program}", *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    names: list[str] = json.loads(done.stderr.splitlines()[-1].replace("'", '"'))
    return names


def measure_starts(rounds: int) -> Iterator[dict[str, Any]]:
    """One row a program."""
    times: dict[str, list[float]] = {name: [] for name in STARTS}
    for turn in range(rounds + 1):
        for name, words in STARTS.items():
            milliseconds = start(words)
            if turn:  # the first fills the file cache
                times[name].append(milliseconds)
    for name, words in STARTS.items():
        us = round(statistics.median(times[name]) * 1e3)
        yield {"op": "start", "name": name, "us": us, "imports": imported(words)}


@contextmanager
def idle_backend() -> Iterator[Any]:
    """A bound layer of a backend whose `forward_mqa` returns a constant."""
    with tempfile.TemporaryDirectory() as folder:
        returned = "AttentionOutput((state, layer.index, q, positions, want_lse, apply_sink))"
        install_backend(Path(folder), "idle", altered((f"return {returned}", "return 1")))
        sys.path.insert(0, folder)
        request = Request("cpu", "", PRESETS["tiny"], 16, Limits(1, 1, 1, 1))
        yield bind_layer(select(request, "idle"), LayerSpec(0, SWA, PRESETS["tiny"], 16), None, None)  # type: ignore[arg-type]
        sys.path.remove(folder)


def microseconds(call: Callable[[], object], number: int = 100_000) -> float:
    """The fastest of twenty repetitions: a call has no reason to be faster than it is."""
    return min(timeit.repeat(call, number=number, repeat=20)) / number * 1e6


def measure_calls() -> Iterator[dict[str, Any]]:
    """One row a way of calling, each less than the call of the empty lambda around it."""
    hot = ("q", "caches", "selected", "positions", "step", "kind_state", "out", True, False)
    with idle_backend() as layer:
        backend = layer.backend
        function = backend.plugin.dsv4_forward_mqa
        hook = backend.manager.hook.dsv4_forward_mqa
        own = dict(zip(hook.spec.argnames, (layer.spec, layer.state, *hot), strict=True))
        direct = [own[name] for name in backend.implementation("dsv4_forward_mqa").argnames]
        bound = layer.forward_mqa
        ways: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "direct": lambda: function(*direct),
            "bound": lambda: bound(*hot),
            "pluggy": lambda: hook(**own),
        }
        times = {name: microseconds(call) for name, call in ways.items()}
    for name in ("direct", "bound", "pluggy"):
        yield {"op": "call", "name": name, "us": round(times[name] - times["nothing"], 4)}


def main() -> None:
    """Measure, print a table, and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    rows = [*measure_starts(arguments.rounds), *measure_calls()]
    table = Table("what", "time", f"imports, of {', '.join(HEAVY)}")
    for row in rows:
        cost = f"{row['us'] / 1e3:.0f} ms" if row["op"] == "start" else f"{row['us']:.3f} µs"
        table.add_row(f"{row['name']} ({row['op']})", cost, ", ".join(row.get("imports", [])))
    Console().print(table)
    if arguments.out:
        facts = provenance("pluggy", "hydra-core", "omegaconf")
        arguments.out.write_text("".join(json.dumps(row | facts) + "\n" for row in rows))


if __name__ == "__main__":
    main()
