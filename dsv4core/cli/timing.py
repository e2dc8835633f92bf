"""Where the time of a run goes: seconds by phase and operation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class OperationTimer:
    """Adds up the time of operations, as a layer's `observe`.

    On a GPU each operation is waited for, so a timed run is slower than an untimed one.

    Attributes:
        phase: The phase that time is counted for.
        seconds: Seconds by phase, then by operation.
    """

    def __init__(self, device: torch.device) -> None:
        self.phase = ""
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._wait = torch.cuda.synchronize if device.type == "cuda" else _nothing

    @contextmanager
    def __call__(self, operation: str) -> Iterator[None]:
        """Count the time of the block for `operation`."""
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[self.phase][operation] += time.perf_counter() - start


def _nothing() -> None:
    """A CPU needs no waiting."""
