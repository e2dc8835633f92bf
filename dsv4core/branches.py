"""Independent parts of a layer side by side on a GPU, where a graph is captured.

A decode's kernels leave most of a GPU idle. Elsewhere it waits for the host, which launches one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

MOST_TOKENS = 256
"""Query tokens of a step, beyond which one branch fills a GPU.

Layers of C4A of V4-Flash with `backend=triton` on an H200, 65,536 tokens of context, one after the other and
beside each other, by a run whose rows are not kept: 128.7 and 123.6 µs for one query token, 207.8 and 201.6
for 16, 267.0 and 261.0 for 64, 421.3 and 415.2 for 128, 714.0 and 712.1 for 256; of C128A 1 µs less up to
128.
"""


def side_by_side(branches: Sequence[Callable[[], Any]], device: torch.device, tokens: int) -> list[Any]:
    """The results of calls that do not depend on each other, in their order.

    The last one runs on the current stream, which then waits for the others. Each of them begins behind what
    the current stream has been given before; so memory that torch frees on a stream is not taken again before
    the other streams have read it, as long as callers keep what branches read until this returns.

    Args:
        branches: The calls.
        device: Where they run.
        tokens: Query tokens of the step.
    """
    if device.type != "cuda" or tokens > MOST_TOKENS or not torch.cuda.is_current_stream_capturing():
        return [branch() for branch in branches]
    current = torch.cuda.current_stream(device)
    *others, last = branches
    results, sides = [], [_stream(device, number) for number in range(len(others))]
    try:
        for side, branch in zip(sides, others, strict=True):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                results.append(branch())
        results.append(last())
    finally:  # a capture that ends before would hide what was raised
        for side in sides:
            current.wait_stream(side)
    return results


@lru_cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
