"""What machine this is: as torch sees it, or, for commands that must not load torch, as the system says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4core.api import ConfigError
from dsv4core.api.selection import Platform

if TYPE_CHECKING:
    import torch

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True)
class Machine:
    """A platform and architecture, and where they are known from.

    Attributes:
        platform: `cpu`, `cuda`, `rocm`, or another type of torch's devices.
        arch: `sm_90`, `gfx942`, …; empty on a CPU.
        source: How it is known, for people.
    """

    platform: Platform
    arch: str
    source: str


def torch_device(name: str) -> torch.device:
    """The torch device that `device=` names, which becomes the current one. Imports torch.

    Raises:
        ConfigError: It is none, or this machine has none such.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name} is not a torch device; use auto, cpu, cuda or cuda:1.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name}: this torch ({torch.__version__}) sees no GPU; use device=cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name}: this machine has {torch.cuda.device_count()} GPUs; count from 0.")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # events, streams and graphs are the current device's
    return device


def machine_of(device: torch.device) -> Machine:
    """The machine behind a torch device: what `run` computes on. Imports torch."""
    import torch

    if device.type == "cpu":
        return Machine("cpu", "", "device=cpu")
    if device.type != "cuda":
        return Machine(device.type, "", "torch says so")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Machine("rocm", properties.gcnArchName.partition(":")[0], "torch says so")
    return Machine("cuda", f"sm_{properties.major}{properties.minor}", "torch says so")


def guess_machine(device: str = "auto") -> Machine:
    """The machine that `device` would be, without torch: its first visible GPU, else its CPU.

    The kind of torch's build and the variables that hide GPUs are heeded. What torch sees may still differ.

    Raises:
        ConfigError: A GPU is asked for and there is none, or that is no device.
    """
    kind, _, number = device.partition(":")
    if not re.fullmatch(r"[a-z]+(:\d+)?", device):
        raise ConfigError(f"device={device} is not a torch device; use auto, cpu, cuda or cuda:1.")
    if kind not in ("auto", "cuda"):
        return Machine(kind, "", f"device={device}")
    gpu = _gpu(int(number or 0))
    if isinstance(gpu, Machine):
        return gpu
    if kind == "cuda":
        raise ConfigError(f"device={device} asks for a GPU, but {gpu}.")
    return Machine("cpu", "", gpu)


def machine_named(arch: str) -> Machine:
    """The machine of an architecture's name, to ask what would happen there.

    Raises:
        ConfigError: It is the name of none.
    """
    if arch == "cpu":
        return Machine("cpu", "", "as asked")
    if re.fullmatch(r"sm_\d+", arch):
        return Machine("cuda", arch, "as asked")
    if re.fullmatch(r"gfx[0-9a-f]+", arch):
        return Machine("rocm", arch, "as asked")
    raise ConfigError(f"request.arch={arch} is no architecture; write it as in sm_90, gfx942 or cpu.")


def _gpu(index: int) -> Machine | str:
    """The visible GPU of that number, or why there is none."""
    build = _torch_build()
    if "+cpu" in build:
        return f"torch {build} is built without support for GPUs"
    # A build says what it is for by +cu130 or +rocm7.0; PyPI's says nothing.
    gpu = (None if "+rocm" in build else _nvidia(index)) or (None if "+cu" in build else _amd(index))
    return gpu or "neither nvidia-smi nor KFD shows a GPU" + (f" of number {index}" if index else "")


def _torch_build() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _visible(*variables: str) -> list[str] | None:
    """The GPUs that the first of the variables that is set lets a process see; None is all of them."""
    for variable in variables:
        if variable in os.environ:
            names = [name.strip() for name in os.environ[variable].split(",")]
            # As the drivers do: a negative or empty name ends the list.
            return list(takewhile(lambda name: name and not name.startswith("-"), names))
    return None


def _nvidia(index: int) -> Machine | None:
    command = shutil.which("nvidia-smi")
    visible = _visible("CUDA_VISIBLE_DEVICES")
    if command is None or (visible is not None and index >= len(visible)):
        return None
    name = str(index) if visible is None else visible[index]
    query = [command, "--query-gpu=compute_cap", "--format=csv,noheader", f"--id={name}"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # nvidia-smi without a driver or a device
        return None
    return Machine("cuda", f"sm_{output.strip().replace('.', '')}", "nvidia-smi says so")


def _amd(index: int) -> Machine | None:
    gpus = list(filter(None, map(_kfd_arch, sorted(KFD_NODES.glob("*/properties"), key=_node_number))))
    visible = _visible("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # A GPU's UUID is not among KFD's properties: the name is then taken for the first.
        numbers = (int(name) if name.isdigit() else 0 for name in visible)
        gpus = [gpus[number] for number in numbers if number < len(gpus)]
    return Machine("rocm", gpus[index], "KFD says so") if index < len(gpus) else None


def _node_number(properties: Path) -> int:
    return int(properties.parent.name)


def _kfd_arch(properties: Path) -> str | None:
    """The architecture of a KFD node, None for a CPU or a GPU that this container may not use."""
    try:
        lines = properties.read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(maxsplit=1) for line in lines if " " in line)
    number = int(fields.get("gfx_target_version", "0"))  # 90402 is gfx942; 0 is a CPU
    if not number:
        return None
    major, minor, step = number // 10000, number // 100 % 100, number % 100
    return f"gfx{major}{minor:x}{step:x}"
