from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsv4core.api import ConfigError
from dsv4core.framework import platform
from dsv4core.framework.platform import Machine, guess_machine, machine_of


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, and no AMD GPU."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "KFD_NODES", tmp_path / "nodes")
    return tmp_path / "nvidia-smi"


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def node(number: int, version: int) -> None:
    folder = platform.KFD_NODES / str(number)
    folder.mkdir(parents=True)
    (folder / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\n")


def test_no_gpu(nvidia_smi: Path) -> None:
    assert guess_machine() == Machine("cpu", "", "neither nvidia-smi nor KFD shows a GPU")
    assert guess_machine("cpu") == Machine("cpu", "", "device=cpu")
    with pytest.raises(ConfigError) as caught:
        guess_machine("cuda:1")
    assert str(caught.value) == "device=cuda:1 asks for a GPU, and neither nvidia-smi nor KFD shows one."


def test_nvidia(nvidia_smi: Path) -> None:
    script(nvidia_smi, "echo 10.3")
    assert guess_machine() == Machine("cuda", "sm_103", "nvidia-smi says so")
    assert guess_machine("cpu").platform == "cpu"


def test_nvidia_smi_without_a_driver(nvidia_smi: Path) -> None:
    script(nvidia_smi, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert guess_machine().platform == "cpu"


@pytest.mark.parametrize(("version", "arch"), [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a")])
def test_amd(nvidia_smi: Path, version: int, arch: str) -> None:
    node(0, 0)
    node(1, version)
    assert guess_machine("cuda") == Machine("rocm", arch, "KFD says so")


def test_other_devices(nvidia_smi: Path) -> None:
    message = "device=xpu cannot be used; use auto, cpu or cuda (also for ROCm)."
    with pytest.raises(ConfigError) as caught:
        guess_machine("xpu")
    assert str(caught.value) == message
    with pytest.raises(ConfigError) as caught:
        machine_of(torch.device("xpu"))
    assert str(caught.value) == message


def test_machine_of_a_cpu() -> None:
    assert machine_of(torch.device("cpu")).platform == "cpu"
