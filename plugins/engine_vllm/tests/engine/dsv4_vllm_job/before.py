"""Run by a .pth file before anything else in every process: Triton's interpreter, and a backend named cpu.

The model's metadata kernels are Triton. The wheel expects a Triton that has a "cpu" backend, and asks nothing
of it but whether its driver is active.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
# With two ranks the embedding is compiled by torch, which would ask that backend for more.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


class Driver:
    """What vLLM asks."""

    @staticmethod
    def is_active() -> bool:
        """Always: the interpreter needs no device."""
        return True


def _install() -> None:
    try:
        from triton import backends
    except ImportError:  # another command of this environment, before Triton is installed
        return
    backend: Any = backends.Backend(compiler=None, driver=Driver)
    backends.backends.setdefault("cpu", backend)


_install()
