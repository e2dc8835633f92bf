"""What becomes of exceptions in a measurement."""

from __future__ import annotations

import pytest
import torch

from dsv4core.bench.gaps import Gap, Unmeasurable, attempt, device_lost

STEP = "layer of decode swa"


def raising(error: Exception) -> Gap | object:
    def measure() -> object:
        raise error

    return attempt(measure, "acme", STEP)


def test_a_result_goes_through() -> None:
    assert attempt(lambda: 3, "acme", STEP) == 3


GAPS = [
    (
        Unmeasurable("It has none; leave it."),
        False,
        "acme left out of layer of decode swa: It has none; leave it.",
    ),
    (
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
        False,
        "acme left out of layer of decode swa: it does not fit the device's memory.",
    ),
    (
        RuntimeError("CUDA error: no image\n\nCompile with `X`.\n"),
        True,
        "acme failed in layer of decode swa: RuntimeError: CUDA error: no image Compile with `X`.",
    ),
]


@pytest.mark.parametrize(("error", "failed", "text"), GAPS)
def test_gaps(error: Exception, failed: bool, text: str) -> None:
    gap = raising(error)
    assert isinstance(gap, Gap)
    assert (gap.failed, str(gap)) == (failed, text)


def test_a_book_is_cut() -> None:
    text = str(raising(RuntimeError("nvcc said " + "no " * 1000)))
    assert len(text) < 350
    assert text.endswith("no ….")


def test_an_interruption_goes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        raising(KeyboardInterrupt())  # type: ignore[arg-type]


def test_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    assert not device_lost(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not device_lost(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert device_lost(torch.device("cuda"))
