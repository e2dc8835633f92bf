from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from dsv4core.api import ConfigError
from dsv4core.framework import platform
from dsv4core.framework.platform import Machine, guess_machine, machine_named, machine_of


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, no AMD GPU, PyPI's torch."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "KFD_NODES", tmp_path / "nodes")
    monkeypatch.setattr(platform, "version", lambda distribution: "2.13.0")
    for variable in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
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
    assert str(caught.value) == (
        "device=cuda:1 asks for a GPU, but neither nvidia-smi nor KFD shows a GPU of number 1."
    )


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


def test_amd_numbers_its_gpus_as_the_kernel_does(nvidia_smi: Path) -> None:
    for number, version in ((0, 0), (2, 90402), (10, 90500)):
        node(number, version)
    assert guess_machine("cuda").arch == "gfx942"
    assert guess_machine("cuda:1").arch == "gfx950"
    with pytest.raises(ConfigError, match="shows a GPU of number 2"):
        guess_machine("cuda:2")


ECHO_THE_GPU = (
    'case "$*" in *--id=0) echo 8.0;; *--id=1) echo 9.0;; *--id=GPU-7f) echo 12.0;; *) exit 6;; esac'
)
NVIDIA = [
    (None, "auto", "sm_80"),
    (None, "cuda:1", "sm_90"),
    ("1,0", "auto", "sm_90"),
    ("1, 0", "cuda:1", "sm_80"),
    ("GPU-7f", "cuda:0", "sm_120"),
    ("", "auto", ""),
    ("-1", "auto", ""),
    ("0,-1,1", "cuda:0", "sm_80"),
]


@pytest.mark.parametrize(("visible", "device", "arch"), NVIDIA)
def test_hidden_nvidia_gpus(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, arch: str
) -> None:
    script(nvidia_smi, ECHO_THE_GPU)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert guess_machine(device).arch == arch


def test_an_entry_below_zero_ends_the_list(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(nvidia_smi, ECHO_THE_GPU)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,-1,1")
    with pytest.raises(ConfigError, match="shows a GPU of number 1"):
        guess_machine("cuda:1")


AMD = [("ROCR_VISIBLE_DEVICES", "1"), ("HIP_VISIBLE_DEVICES", "1,0"), ("CUDA_VISIBLE_DEVICES", "1")]


@pytest.mark.parametrize(("variable", "visible"), AMD)
def test_hidden_amd_gpus(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, variable: str, visible: str
) -> None:
    for number, version in ((1, 90402), (2, 90500)):
        node(number, version)
    monkeypatch.setenv(variable, visible)
    assert guess_machine().arch == "gfx950"


BUILDS = [
    ("2.13.0", "cuda"),
    ("2.13.0+cu130", "cuda"),
    ("2.13.0+rocm7.0", "rocm"),
    ("2.13.0a0+git1a2b", "cuda"),
    ("2.13.0+cpu", "cpu"),
]


@pytest.mark.parametrize(("build", "expected"), BUILDS)
def test_torch_sees_only_what_it_is_built_for(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, build: str, expected: str
) -> None:
    script(nvidia_smi, "echo 9.0")
    node(1, 90402)
    monkeypatch.setattr(platform, "version", lambda distribution: build)
    assert guess_machine().platform == expected


def test_a_torch_for_cpus(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(nvidia_smi, "echo 9.0")
    monkeypatch.setattr(platform, "version", lambda distribution: "2.13.0+cpu")
    assert guess_machine().source == "torch 2.13.0+cpu is built without support for GPUs"
    with pytest.raises(ConfigError) as caught:
        guess_machine("cuda")
    assert str(caught.value) == (
        "device=cuda asks for a GPU, but torch 2.13.0+cpu is built without support for GPUs."
    )


def test_without_torch(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(distribution: str) -> str:
        raise PackageNotFoundError(distribution)

    script(nvidia_smi, "echo 9.0")
    monkeypatch.setattr(platform, "version", version)
    assert guess_machine().arch == "sm_90"


NAMES = [("sm_90", "cuda"), ("sm_120", "cuda"), ("gfx90a", "rocm"), ("gfx950", "rocm")]


@pytest.mark.parametrize(("arch", "expected"), NAMES)
def test_a_machine_by_name(arch: str, expected: str) -> None:
    assert machine_named(arch) == Machine(expected, arch, "as asked")  # type: ignore[arg-type]
    assert machine_named("cpu") == Machine("cpu", "", "as asked")


@pytest.mark.parametrize("arch", ["90", "sm90", "sm_90a", "SM_90", "hopper", "gfx", ""])
def test_names_of_no_machine(arch: str) -> None:
    with pytest.raises(ConfigError) as caught:
        machine_named(arch)
    assert str(caught.value) == (
        f"request.arch={arch} is no architecture; write it as in sm_90, gfx942 or cpu."
    )


@pytest.mark.parametrize("device", ["cuda:x", "cuda:-1", "cpu:x", "", "GPU", "cuda 1"])
def test_no_devices(nvidia_smi: Path, device: str) -> None:
    with pytest.raises(ConfigError) as caught:
        guess_machine(device)
    assert str(caught.value) == f"device={device} is not a torch device; use auto, cpu, cuda or cuda:1."


def test_devices_of_other_makers_are_platforms_of_their_own(nvidia_smi: Path) -> None:
    assert guess_machine("xpu:1") == Machine("xpu", "", "device=xpu:1")
    assert machine_of(torch.device("xpu")) == Machine("xpu", "", "torch says so")


def test_machine_of_a_cpu() -> None:
    assert machine_of(torch.device("cpu")).platform == "cpu"
