"""Peak memory of `dsv4 run` by length of context, one process a length: it has to grow linearly.

python benchmarks/memory_by_context.py [--out benchmarks/results/cpu/memory_by_context.jsonl]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LENGTHS = (2048, 4096, 8192, 16384)
CHUNK, LAYERS = 512, "[0,1,2]"


def run(length: int) -> dict[str, Any]:
    """The report of a run over one layer of each kind."""
    keys = [f"prefill={length - 2}", "decode=2", "batch=1", f"chunk={CHUNK}", f"layers={LAYERS}", "json=true"]
    command = [
        sys.executable,
        "-c",
        "from dsv4core.cli.main import main; raise SystemExit(main())",
        "run",
        *keys,
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    report: dict[str, Any] = json.loads(output)
    return report


def main() -> None:
    """Measure, print a table, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    table = Table(title=f"one layer of each kind, chunks of {CHUNK} tokens")
    for name in ("context", "caches MiB", "peak MiB", "more than half the context, MiB"):
        table.add_column(name, justify="right")
    rows, before = [], None
    for length in LENGTHS:
        report = run(length)
        pools, peak = report["kv_cache"]["pool_bytes"], report["peak_bytes"]
        rows.append(
            {"context": length, "chunk": CHUNK, "layers": LAYERS, "pool_bytes": pools, "peak_bytes": peak}
        )
        more = "" if before is None else f"{(peak - before) / 2**20:,.1f}"
        table.add_row(f"{length:,}", f"{pools / 2**20:,.2f}", f"{peak / 2**20:,.1f}", more)
        before = peak
    Console().print(table)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
