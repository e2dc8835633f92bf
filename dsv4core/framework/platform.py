"""What machine this is: as torch sees it, or, for commands that must not load torch, as the system says."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
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
        platform: `cpu`, `cuda` or `rocm`.
        arch: `sm_90`, `gfx942`, …; empty on a CPU.
        source: How it is known, for people.
    """

    platform: Platform
    arch: str
    source: str


def machine_of(device: torch.device) -> Machine:
    """The machine behind a torch device: what `run` computes on. Imports torch.

    Raises:
        ConfigError: The device is neither a CPU nor a CUDA or ROCm device.
    """
    import torch

    if device.type == "cpu":
        return Machine("cpu", "", "device=cpu")
    if device.type != "cuda":
        raise ConfigError(f"device={device} cannot be used; use auto, cpu or cuda (also for ROCm).")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Machine("rocm", properties.gcnArchName.partition(":")[0], "torch says so")
    return Machine("cuda", f"sm_{properties.major}{properties.minor}", "torch says so")


def guess_machine(device: str = "auto") -> Machine:
    """The machine that `device` would be, without torch: its first GPU, else its CPU.

    It may differ from what torch sees, for example where torch was built without GPU support.

    Raises:
        ConfigError: A GPU is asked for and none is found, or the device is of another type.
    """
    kind = device.partition(":")[0]
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={device} cannot be used; use auto, cpu or cuda (also for ROCm).")
    if kind == "cpu":
        return Machine("cpu", "", "device=cpu")
    gpu = _nvidia() or _amd()
    if gpu is None and kind == "cuda":
        raise ConfigError(f"device={device} asks for a GPU, and neither nvidia-smi nor KFD shows one.")
    return gpu or Machine("cpu", "", "neither nvidia-smi nor KFD shows a GPU")


def _nvidia() -> Machine | None:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=compute_cap", "--format=csv,noheader", "--id=0"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # nvidia-smi without a driver or a device
        return None
    return Machine("cuda", f"sm_{output.strip().replace('.', '')}", "nvidia-smi says so")


def _amd() -> Machine | None:
    for properties in sorted(KFD_NODES.glob("*/properties")):
        try:
            lines = properties.read_text().splitlines()
        except OSError:  # a GPU that this container may not use
            continue
        fields = dict(line.split(maxsplit=1) for line in lines if " " in line)
        version = int(fields.get("gfx_target_version", "0"))  # 90402 is gfx942; 0 is a CPU
        if version:
            major, minor, step = version // 10000, version // 100 % 100, version % 100
            return Machine("rocm", f"gfx{major}{minor:x}{step:x}", "KFD says so")
    return None
