"""What the backend launches compiles for AMD's chips, within their LDS; how it runs there nobody says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dsv4_plugin_rocm_aiter.routes import ARCHITECTURES

HERE = Path(__file__).parent
COMPILER = HERE.parents[2] / "tests" / "triton" / "compile_kernels.py"
LDS = {"gfx942": 64 << 10, "gfx950": 160 << 10}
"""Bytes that a program may have."""
KERNELS = {"_insert", "_attend", "_gather_rows", "_pool", "_keep_states", "_score", "_count", "_write"}
"""Those whose code follows the flavours of pools, and the backend's own two."""
PRODUCTS = {"gfx942": {"_attend": "bf16", "_score": "f16"}, "gfx950": {"_attend": "bf16", "_score": "f8f6f4"}}
"""What matrix instructions take. gfx942's of FP8 read FNUZ: OCP's keys would come out at half their value."""


@pytest.mark.parametrize("chip", ARCHITECTURES)
def test_every_launch_compiles(chip: str) -> None:
    if not COMPILER.exists():
        pytest.skip("The core's tests, which have the compiler of launches, are not beside this package.")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(COMPILER), chip, str(HERE / "launches.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {kernel for kernel, *_ in lines} >= KERNELS
    for kernel, shared, *products in lines:
        assert int(shared) <= LDS[chip], f"{kernel} has no room on {chip}: {shared} bytes."
        if kernel in PRODUCTS[chip]:
            operands = {product.rpartition("_")[2] for product in products}
            assert operands == {PRODUCTS[chip][kernel]}, f"{kernel} multiplies with {products}."
