"""Every launch compiles for chips that are not here, within their shared memory; how it runs is not said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4core import ops

SHARED = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_90": 227 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
"""Bytes of shared memory (LDS) that a program may have."""
OPERATIONS = Path(ops.__file__).parent
PRODUCTS = {
    "gfx942": {"_attend": {"bf16", "f32"}, "_score": {"f16", "f32"}, "_times_rows": {"bf16", "f32"}},
    "gfx950": {"_attend": {"bf16", "f32"}, "_score": {"f8f6f4", "f32"}, "_times_rows": {"bf16", "f32"}},
}
"""Kernels that multiply on AMD's matrix units, and what their instructions take. On gfx942 OCP's codes, which
its FP8 instructions do not read, are multiplied as fp16."""


def launched() -> set[str]:
    """Kernels of the operations: functions of Triton that no other one calls."""
    found: set[str] = set()
    for file in OPERATIONS.glob("*/*triton.py"):
        text = file.read_text()
        names = re.findall(r"^@triton\.jit(?:\(.*\))?\ndef (\w+)\(", text, re.MULTILINE)
        own = {name for name in names if len(re.findall(rf"\b{name}\(", text)) == 1}
        assert not own & found, f"{own & found} would be two kernels of one name in {file}."
        found |= own
    return found


@pytest.mark.parametrize("chip", SHARED)
def test_every_launch_compiles(chip: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).with_name("compile_kernels.py")
    command = [sys.executable, str(script), chip]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {kernel for kernel, *_ in lines} == launched()
    for kernel, shared, *_ in lines:
        assert int(shared) <= SHARED[chip], f"{kernel} has no room on {chip}: {shared} bytes."
    for kernel, operands in PRODUCTS.get(chip, {}).items():
        own = [products for name, _, *products in lines if name == kernel]
        assert all(own), f"A launch of {kernel} does not multiply on matrix units."
        assert {product.rpartition("_")[2] for products in own for product in products} == operands
