"""What is not measured, and why: it does not exist, it does not fit, or it failed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from dsv4core.api import ConfigError
from dsv4core.framework.switches import strict
from dsv4core.framework.wording import one_line

Result = TypeVar("Result")
LONGEST = 300
"""Letters of an exception's text: a failed build is a book."""


class Unmeasurable(ConfigError):
    """A layer kind has no such operation, or a peer does not take these inputs; others may."""


@dataclass(frozen=True)
class Gap:
    """A measurement that is not there.

    Attributes:
        backend: Whose it would be: a backend, or `peer:<name>`.
        step: What would be measured, in words.
        why: A sentence.
        failed: Whether it was tried and failed, rather than left out.
    """

    backend: str
    step: str
    why: str
    failed: bool = False

    def __str__(self) -> str:
        return f"{self.backend} {'failed in' if self.failed else 'left out of'} {self.step}: {self.why}"


def attempt(measure: Callable[[], Result], backend: str, step: str) -> Result | Gap:
    """What `measure` returns, or why there is nothing: other measurements are to go on.

    With `DSV4_STRICT=1` exceptions go through.
    """
    try:
        return measure()
    except Unmeasurable as error:
        return Gap(backend, step, str(error))
    except torch.OutOfMemoryError:
        return Gap(backend, step, "it does not fit the device's memory.")
    except Exception as error:  # a kernel's, a library's, a compiler's
        if strict():
            raise
        why = textwrap.shorten(one_line(error), LONGEST, placeholder=" …")
        return Gap(backend, step, f"{why.rstrip('.')}.", failed=True)


def device_lost(device: torch.device) -> bool:
    """Whether an error has left the device such that this process cannot use it any more."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:  # of a type that depends on torch's version
        return True
    return False
