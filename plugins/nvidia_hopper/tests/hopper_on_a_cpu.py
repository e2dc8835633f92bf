"""The kernels' source, compiled for a CPU: `cpu/ptx.cuh` has each thread of a cluster as a fiber."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from dsv4_plugin_hopper import compiled

HERE = Path(__file__).with_name("cpu")
Launch = Callable[[str, Any, tuple[int, int, int], int, tuple[tuple[Any, Any], ...]], None]


def library(folder: Path) -> ctypes.CDLL:
    """Compile it, or skip the test where no compiler is."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("No C++ compiler is installed.")
    made = folder / "launch.so"
    places = ("-I", str(HERE), "-I", str(compiled.SOURCE.parent))
    options = ("-std=c++17", "-O3", "-w", "-shared", "-fPIC")
    subprocess.run([compiler, *options, *places, str(HERE / "launch.cpp"), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


def launcher(library: ctypes.CDLL) -> Launch:
    """What stands for `compiled.launch`: another order of threads at each launch."""
    address = ctypes.c_void_p.in_dll(library, "launch").value
    seeds = count()

    def launch(
        name: str,
        device: Any,
        grid: tuple[int, int, int],
        threads: int,
        arguments: tuple[tuple[Any, Any], ...],
    ) -> None:
        assert threads == 512
        values, types = zip(*arguments, strict=True)
        call = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_char_p, *[ctypes.c_int] * 4, *types)(address)
        failed = call(name.encode(), next(seeds), *grid, *values)
        assert not failed, failed.decode()

    return launch
