"""Where a tile's time goes in `backend=hopper`'s kernel: clocks of one block, in a copy of its source.

    python benchmarks/trace_hopper.py [TOKENS ...]

needs the plugin and an sm_90 GPU. It prints the cycles that warp 0 of each group spends up to each place,
medians over tiles, with packed rows, 64 heads and 1,664 keys, cold L2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from compare_hopper import DEVICE, ENTRIES, MODEL, WINDOW, filled, turn
from dsv4_plugin_hopper import compiled
from dsv4_plugin_hopper.attend import attend, division

HEADS, CHOSEN, TILES = 64, 1536, 26
"""Heads, entries beside a window of 128, and the tiles that they are."""
CLOCK = """
DEVICE void mark(const Work& work, int tile, int place, int warp, int lane) {
  u32 now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
  const bool mine = work.start == 0 && warp == 0 && lane == 0;
  if (mine && tile < TILES) ((u32*)work.lse)[tile * PLACES + place] = now;
}

"""
PLACES = (
    # The group, what ends there, and lines that the mark is put before.
    ("rows", "", "    ahead.next(), ahead.bring(0);\n    copies_wait"),
    ("rows", "look up, bring eight rows", "    copies_wait<RING - 1>();\n    wait_for_operands"),
    ("rows", "wait for copies and operands", "    turn_rows<FORMAT, F16>(shared, tile, 0"),
    ("rows", "turn eight", "    __syncwarp();\n    ahead.bring(1);"),
    ("rows", "bring eight, wait for copies", "    turn_rows<FORMAT, F16>(shared, tile, 1"),
    ("rows", "turn eight", "    arrive_once(shared.rows_full[tile & 1], lane);\n  }\n}\n\n// The same for"),
    ("scores", "", "    shared_for_products();\n    multiply"),
    ("scores", "products", "    weigh<FORMAT, F16>("),
    ("scores", "weights", "    if (!(kind & LAST)) continue;"),
    ("sums", "", "    products_begin();\n#pragma unroll\n    for (int k = 0; k < 4; ++k) sum_128"),
    ("sums", "products", "    arrive_once(shared.summed[tile & 1], lane);"),
)


def traced() -> str:
    """The source with a mark at each place; log-sum-exps are not written, but clocks.

    Raises:
        SystemExit: The source has other lines.
    """
    source = compiled.SOURCE.read_text()
    changes = [(line, f"mark(work, tile, {i}, warp, lane);\n{line}") for i, (_, _, line) in enumerate(PLACES)]
    changes += [
        ("int add_up(Shared& shared", "int add_up(const Work& work, Shared& shared"),
        ("add_up<F16>(shared", "add_up<F16>(work, shared"),
        ("if (work.lse && part == 0", "if (false && part == 0"),
        ("enum Kind {", f"constexpr int TILES = {TILES}, PLACES = {len(PLACES)};{CLOCK}enum Kind {{"),
    ]
    for line, new in changes:
        if source.count(line) != 1:
            raise SystemExit(f"{compiled.SOURCE.name} has not one {line!r} any more; mend the lists here.")
        source = source.replace(line, new)
    return source


def clocks(tokens: int) -> torch.Tensor:
    """`[tiles, places]` cycles, of a block's first query.

    Raises:
        SystemExit: So few tokens are cut into slices.
    """
    if division("packed_bf16", torch.cuda.current_device(), tokens, HEADS, TILES).slices > 1:
        raise SystemExit(f"{tokens} tokens are cut into slices; give more, 128 as an example.")
    torch.manual_seed(0)
    window, entries = filled(WINDOW), filled(ENTRIES)
    inputs = [turn(window, entries, HEADS, CHOSEN, tokens) for _ in range(8)]
    sinks, found = torch.zeros(HEADS, device=DEVICE), torch.empty(0)
    for i in range(200):  # clocks of the GPU have settled by then
        _, lse = attend(*inputs[i % len(inputs)], MODEL.softmax_scale, sinks, want_lse=True)
        assert lse is not None
        found = lse
    return found.view(torch.int32).flatten()[: TILES * len(PLACES)].view(TILES, -1).cpu().long()


def main(tokens: list[int]) -> None:
    """Print a table for each number of query tokens, which are to be one block's each: 132 on an H200."""
    source = traced()
    with TemporaryDirectory() as folder:
        compiled.SOURCE = Path(folder) / "attend.cu"
        compiled.SOURCE.write_text(source)
        for count in tokens:
            found = clocks(count)
            period = (found[-1, 0] - found[4, 0]).item() / (TILES - 5) % (1 << 32)
            print(f"\n{count} tokens: {period:,.0f} cycles a tile")
            for place, (group, what, _) in enumerate(PLACES):
                if what:
                    spent = (found[4:-1, place] - found[4:-1, place - 1]) % (1 << 32)
                    print(f"  {group:8}{what:32}{spent.median().item():6,}")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [128])
