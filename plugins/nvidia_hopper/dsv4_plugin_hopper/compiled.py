"""The kernels, compiled by NVRTC at their first use, and kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

from dsv4core.api import DSV4Error

SOURCE, HEADER = (Path(__file__).with_name(name) for name in ("attend.cu", "ptx.cuh"))
OPTIONS = (b"--gpu-architecture=sm_90a", b"--std=c++17")
SHARED_BYTES = 227 << 10
"""What sm_90 lets a block have."""
DIGEST = 32
"""Bytes of a kept file before what was compiled, which they are the SHA-256 of."""
LOADING = "update the driver, or install the torch and cuda-bindings of its CUDA"
"""What to do where the driver does not take the kernels."""


@cache
def function(name: str, device: int) -> Any:
    """A kernel of the source on a device.

    Raises:
        DSV4Error: It does not compile, or the driver does not take it.
    """
    found = _checked(driver.cuModuleGetFunction(module(device), name.encode()), LOADING)
    attributes = driver.CUfunction_attribute
    most_bytes = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    large_clusters = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED  # above 8
    for attribute, value in ((most_bytes, SHARED_BYTES), (large_clusters, 1)):
        _checked(driver.cuFuncSetAttribute(found, attribute, value), LOADING)
    return found


def load(names: Iterable[str], device: torch.device, cluster_sizes: Iterable[int], threads: int) -> None:
    """Compile kernels, load them, and ask how many clusters run at once: a capture finds all of it."""
    with torch.cuda.device(device):
        number = torch.cuda.current_device()
        for name in names:
            for size in cluster_sizes:
                clusters(name, number, size, threads)


@cache
def module(device: int) -> Any:
    """The kernels, loaded into a device's context."""
    with _context(device):
        return _checked(driver.cuModuleLoadData(cubin()), LOADING)


def cubin() -> bytes:
    """The compiled source: from disk where this NVRTC has compiled it."""
    source, header, version = SOURCE.read_bytes(), HEADER.read_bytes(), _checked(nvrtc.nvrtcVersion())
    name = hashlib.sha256(source + header + repr((OPTIONS, version)).encode()).hexdigest()[:32]
    with suppress(OSError, RuntimeError):  # no home, or none that can be read
        found = _kept(name).read_bytes()
        if found[:DIGEST] == _digest(found[DIGEST:]):  # a damaged one can be the driver's end
            return found[DIGEST:]
    made = _compile(source, header)
    with suppress(OSError, RuntimeError):  # where nothing can be kept it is compiled in each process
        _keep(_kept(name), _digest(made) + made)
    return made


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _kept(name: str) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "dsv4core" / "hopper" / f"{name}.cubin"


def _keep(path: Path, content: bytes) -> None:
    """Whole or not at all, whoever else compiles it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.close()
            Path(file.name).replace(path)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise


@contextmanager
def _context(device: int) -> Iterator[None]:
    """The device, and its context: a thread that has called nothing of CUDA's runtime has none yet."""
    with torch.cuda.device(device):
        if int(_checked(driver.cuCtxGetCurrent())) == 0:
            _checked(driver.cuCtxSetCurrent(_checked(driver.cuDevicePrimaryCtxRetain(device))))
        yield


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
    with _context(device):
        kernel, config = function(name, device), _config(grid, threads)
        config.hStream = torch.cuda.current_stream().cuda_stream
        values, types = zip(*arguments, strict=True)
        _checked(driver.cuLaunchKernelEx(config, kernel, (values, types), 0))


@cache
def clusters(name: str, device: int, blocks: int, threads: int) -> int:
    """How many clusters of so many blocks a device runs at once; 0 where it has none of that size."""
    with _context(device):
        config = _config((blocks, 1, 1), threads)
        status, found = driver.cuOccupancyMaxActiveClusters(function(name, device), config)
    if status == driver.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE:
        return 0
    return int(_checked((status, found)))


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


def _checked(result: tuple[Any, ...], fix: str = "") -> Any:
    """What a call returns besides its status."""
    status, *values = result
    if int(status) != 0:
        raise DSV4Error(f"{type(status).__name__}: {status.name} ({int(status)}){fix and f'; {fix}'}.")
    return values[0] if len(values) == 1 else tuple(values)


POINTER, LONG, UNSIGNED = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_uint
INT, FLOAT = ctypes.c_int, ctypes.c_float
