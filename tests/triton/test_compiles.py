"""Every kernel compiles for chips that are not here, within their shared memory; how it runs is not said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SHARED = {"sm_80": 163 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
"""Bytes of shared memory (LDS) that a program may have."""


def test_every_kernel_compiles() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 13 * len(SHARED)
    for kernel, chip, form, shared in lines:
        assert int(shared) <= SHARED[chip], (
            f"{kernel} of format {form} has no room on {chip}: {shared} bytes."
        )
