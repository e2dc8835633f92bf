"""`backend=flashinfer` on a CPU: its own hooks, on a stub of FlashInfer and the definitions of the core.

On an H200 with FlashInfer, the backend itself.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import stub_flashinfer
import torch
from dsv4_plugin_flashinfer import plugin

from dsv4core import libraries
from dsv4core.api import hookimpl
from dsv4core.testing.fakes import declare_backends, isolate
from dsv4core.testing.subject import Subject

GPU = torch.cuda.is_available()
MOST_MAPPED = -4
"""glibc's number for how many allocations are mapped and not in the heap."""


def stubbed_backend(engine: str) -> ModuleType:
    """The backend on a CPU, without a library, by the engine of some architecture."""

    @hookimpl
    def dsv4_backend_info():
        """With the capabilities of that architecture."""
        info = plugin.dsv4_backend_info()
        own = info.on("sm_90") if engine == "fa3" else info
        return replace(own, platforms=("cpu",), requirements=())

    module = ModuleType("stubbed")
    vars(module).update({name: hook for name, hook in vars(plugin).items() if name.startswith("dsv4_")})
    module.dsv4_backend_info = dsv4_backend_info
    return module


def install_stub(engine: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub is imported as `flashinfer`, and the backend on it is `flashinfer`."""
    for name in [name for name in sys.modules if name.startswith("dsv4_plugin_flashinfer.")]:
        if name.endswith((".fa3", ".trtllm")):
            monkeypatch.delitem(sys.modules, name)  # they hold the last test's stub
    for name, module in stub_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "stubbed_flashinfer", stubbed_backend(engine))
    monkeypatch.setattr(plugin, "engine_of", lambda request: engine)
    monkeypatch.setattr(libraries, "installed", lambda name: None)
    declare_backends(
        folder,
        "stubbed",
        {"reference": "dsv4core.backends.reference", "flashinfer": "stubbed_flashinfer"},
    )
    isolate(folder, monkeypatch)


if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # chosen before kernels are defined


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRTLLM-gen."""
    install_stub("trtllm-gen", tmp_path, monkeypatch)


@pytest.fixture
def dsv4(stub: None) -> Subject:
    return Subject("flashinfer", device=torch.device("cpu"))


@pytest.fixture
def fa3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """FA3: on a GPU the real one."""
    if GPU:
        return Subject("flashinfer", device=torch.device("cuda"))
    # Pools as near each other as on a GPU: all in the heap, and not some mapped 46 TB away.
    assert ctypes.CDLL(None).mallopt(MOST_MAPPED, 0)
    install_stub("fa3", tmp_path, monkeypatch)
    return Subject("flashinfer", device=torch.device("cpu"))
