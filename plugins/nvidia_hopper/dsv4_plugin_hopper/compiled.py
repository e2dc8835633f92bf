"""The kernels, compiled by NVRTC at their first use, and kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

from dsv4core.api import DSV4Error

SOURCE, HEADER = (Path(__file__).with_name(name) for name in ("attend.cu", "ptx.cuh"))
OPTIONS = (b"--gpu-architecture=sm_90a", b"--std=c++17")
SHARED_BYTES = 227 << 10
"""What sm_90 lets a block have."""


@lru_cache
def function(name: str, device: int) -> Any:
    """A kernel of the source on a device, whose context is current.

    Raises:
        DSV4Error: It does not compile, or the driver does not take it.
    """
    found = _checked(driver.cuModuleGetFunction(module(device), name.encode()))
    attributes = driver.CUfunction_attribute
    most_bytes = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    large_clusters = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED  # above 8
    for attribute, value in ((most_bytes, SHARED_BYTES), (large_clusters, 1)):
        _checked(driver.cuFuncSetAttribute(found, attribute, value))
    return found


def load(names: Iterable[str], device: torch.device) -> None:
    """Compile kernels, and load them into the context of a device."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # a context is current
        for name in names:
            function(name, torch.cuda.current_device())


@lru_cache
def module(device: int) -> Any:
    """The kernels, loaded into the current context of a device."""
    return _checked(driver.cuModuleLoadData(cubin()))


def cubin() -> bytes:
    """The compiled source: from disk where this NVRTC has compiled it before."""
    source, header, version = SOURCE.read_bytes(), HEADER.read_bytes(), _checked(nvrtc.nvrtcVersion())
    name = hashlib.sha256(source + header + repr((OPTIONS, version)).encode()).hexdigest()[:32]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = home / "dsv4core" / "hopper" / f"{name}.cubin"
    if kept.exists():
        return kept.read_bytes()
    made = _compile(source, header)
    with suppress(OSError):  # where nothing can be kept it is compiled in each process
        kept.parent.mkdir(parents=True, exist_ok=True)
        new = kept.with_suffix(f".{os.getpid()}")
        new.write_bytes(made)
        new.replace(kept)  # whole or not at all, whoever else compiles it
    return made


def launch(
    name: str,
    device: int,
    grid: tuple[int, int, int],
    threads: int,
    arguments: tuple[tuple[Any, Any], ...],
) -> None:
    """Launch a kernel on the current stream of a device.

    Args:
        name: Of the kernel.
        device: Its number.
        grid: Blocks; those of the first dimension are a cluster.
        threads: Of a block.
        arguments: Values and their C types.

    Raises:
        DSV4Error: The driver refuses.
    """
    with torch.cuda.device(device):
        kernel, config = function(name, device), _config(grid, threads)
        config.hStream = torch.cuda.current_stream().cuda_stream
        values, types = zip(*arguments, strict=True)
        _checked(driver.cuLaunchKernelEx(config, kernel, (values, types), 0))


@lru_cache
def clusters(name: str, device: int, blocks: int, threads: int) -> int:
    """How many clusters of so many blocks a device runs at once."""
    with torch.cuda.device(device):
        config = _config((blocks, 1, 1), threads)
        return int(_checked(driver.cuOccupancyMaxActiveClusters(function(name, device), config)))


def _config(grid: tuple[int, int, int], threads: int) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = SHARED_BYTES
    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = grid[0], 1, 1
    config.attrs, config.numAttrs = [cluster], 1
    return config


def _compile(source: bytes, header: bytes) -> bytes:
    names = SOURCE.name.encode(), 1, [header], [HEADER.name.encode()]
    program = _checked(nvrtc.nvrtcCreateProgram(source, *names))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), list(OPTIONS))
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.decode().rstrip("\0 \n")
        raise DSV4Error(f"{SOURCE.name} does not compile: {said}")
    made = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, made))
    return made


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call returns besides its status."""
    status, *values = result
    if int(status) != 0:
        raise DSV4Error(
            f"{type(status).__name__}: {status.name} ({int(status)}); update the driver or torch."
        )
    return values[0] if len(values) == 1 else tuple(values)


POINTER, LONG, UNSIGNED, INT, FLOAT = (
    *(ctypes.c_void_p, ctypes.c_longlong, ctypes.c_uint, ctypes.c_int, ctypes.c_float),
)
