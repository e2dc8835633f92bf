"""Times sources of `backend=hopper`'s kernel side by side, on packed rows: what its notes quote.

    python benchmarks/compare_hopper.py [SOURCE.cu ...]

needs the plugin, whose own source is the first column; others take the same arguments. A `!` is beside the
times of one whose results differ from the first's by more than 0.4 percent.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from dsv4_plugin_hopper import compiled
from dsv4_plugin_hopper.attend import Pool, attend, division

from dsv4core.bench.timing import microseconds
from dsv4core.kvcache import KVCache, allocate_cache, cache_layout
from dsv4core.model.shapes import PRESETS

DEVICE = torch.device("cuda")
MODEL = PRESETS["v4_flash"]
FORMAT = cache_layout(MODEL, "fp8_ds_mla", "fp8").window
SHAPES = ((64, 512), (64, 1536), (128, 1024))
"""Heads, and entries beside a window of 128."""
TOKENS = (1, 8, 32, 64, 128, 256, 512)
ENTRIES, WINDOW = 1 << 19, 1 << 15
"""Rows of the pools: 300 MB and 19 MB."""


def filled(rows: int) -> KVCache:
    """A pool of random rows."""
    cache = allocate_cache(FORMAT, rows // 64, 64, DEVICE)
    for first in range(0, rows, WINDOW):
        cache.write(
            torch.arange(first, first + WINDOW, device=DEVICE), torch.randn(WINDOW, 512, device=DEVICE)
        )
    return cache


def run(sources: list[Path]) -> None:
    """Print microseconds, a column for each source."""
    torch.manual_seed(0)
    window, entries = filled(WINDOW), filled(ENTRIES)
    print(f"{'':16}", *(f"{source.stem:>12}" for source in sources))
    for heads, chosen in SHAPES:
        for tokens in TOKENS:
            inputs = [
                turn(window, entries, heads, chosen, tokens) for _ in range(max(4, min(16, 2048 // tokens)))
            ]
            print(f"h{heads} n{128 + chosen} T{tokens}".ljust(16), *times(sources, inputs), flush=True)


def turn(
    window: KVCache, entries: KVCache, heads: int, chosen: int, tokens: int
) -> tuple[torch.Tensor, list[Pool]]:
    """Queries, and what they attend: other rows each time."""
    q = torch.randn(tokens, heads, 512, device=DEVICE).bfloat16()
    return q, [
        Pool(
            cache,
            torch.randint(rows, (tokens, width), dtype=torch.int32, device=DEVICE),
            torch.full((tokens,), width, dtype=torch.int32, device=DEVICE),
        )
        for cache, rows, width in ((window, WINDOW, 128), (entries, ENTRIES, chosen))
    ]


def times(sources: list[Path], inputs: list[tuple[torch.Tensor, list[Pool]]]) -> list[str]:
    """Of each source, in a captured graph."""
    sinks, found, due = torch.zeros(inputs[0][0].shape[1], device=DEVICE), [], None
    for source in sources:
        compiled.SOURCE = source
        compiled.module.cache_clear()
        compiled.function.cache_clear()
        compiled.clusters.cache_clear()
        division.cache_clear()
        out, _ = attend(*inputs[0], MODEL.softmax_scale, sinks)
        due = out if due is None else due
        calls = [lambda own=own: attend(*own, MODEL.softmax_scale, sinks) for own in inputs]
        wrong = float((out - due).float().norm()) > 4e-3 * float(due.float().norm())
        found.append(f"{microseconds(calls, DEVICE, graph=True):11.1f}{'!' if wrong else ' '}")
    return found


if __name__ == "__main__":
    run([compiled.SOURCE, *map(Path, sys.argv[1:])])
