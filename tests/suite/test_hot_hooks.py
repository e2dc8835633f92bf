"""Hooks that wait, or take more memory than was planned, are seen: with counts of a GPU that is not there."""

from __future__ import annotations

import pytest
import torch

from dsv4core.testing import hot
from dsv4core.testing.hot import Replayed, within_memory, without_waiting


class Memory:
    """torch's counts of a GPU's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)

    def reset(self) -> None:
        self.peak = self.now

    def take(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


@pytest.mark.parametrize(("temporary", "fits"), [(1000, True), (1000 + hot.ROUNDING + 1, False)])
def test_memory(monkeypatch: pytest.MonkeyPatch, temporary: int, fits: bool) -> None:
    memory = Memory(monkeypatch)

    def hook(result: int) -> int:
        memory.take(temporary)
        memory.take(-temporary)
        memory.take(result)
        return result

    measured = within_memory(1000)("forward_mqa", hook)
    if fits:
        assert measured(10**9) == 10**9
    else:
        with pytest.raises(
            AssertionError, match=r"dsv4_forward_mqa took .* and its plan's workspace_bytes are 1,000"
        ):
            measured(0)


def test_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits() -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    def fails() -> None:
        raise RuntimeError("an illegal memory access")

    assert without_waiting("o_proj", lambda: 3)() == 3
    with pytest.raises(AssertionError, match="dsv4_o_proj waits for the device: called a synchronizing"):
        without_waiting("o_proj", waits)()
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        without_waiting("o_proj", fails)()
    assert modes == ["error", "default"] * 3


def test_a_replay_sees_values_and_not_sizes() -> None:
    replayed = Replayed(lambda x, factor: x * len(x) * factor, torch.device("cpu"))
    assert replayed(torch.ones(3), 2).tolist() == [6, 6, 6]
    assert replayed(torch.full((1,), 5.0), 100).tolist() == [30], "3 rows and a factor of 2 were captured"
    with pytest.raises(AssertionError, match="has a width that depends on the step"):
        replayed(torch.ones(3, 2), 2)
