"""`backend=hopper` on a CPU: its own hooks, and its kernels' source by threads that are fibers."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from dsv4_plugin_hopper import plugin

from dsv4core import libraries
from dsv4core.api import hookimpl
from dsv4core.testing.fakes import declare_backends, isolate
from dsv4core.testing.subject import Subject


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernels, compiled for a CPU."""
    from hopper_on_a_cpu import library

    return library(tmp_path_factory.mktemp("cpu"))


def on_a_cpu() -> ModuleType:
    """The backend for a CPU, which needs no library."""

    @hookimpl
    def dsv4_backend_info():
        return replace(plugin.dsv4_backend_info(), platforms=("cpu",), requirements=())

    module = ModuleType("hopper_for_a_cpu")
    vars(module).update({name: hook for name, hook in vars(plugin).items() if name.startswith("dsv4_")})
    module.dsv4_backend_info = dsv4_backend_info
    return module


@pytest.fixture
def dsv4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Subject:
    """The backend: on a GPU as it is."""
    if torch.cuda.is_available():
        return Subject("hopper", device=torch.device("cuda"))
    if find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed: there is no module `cuda`.")
    from dsv4_plugin_hopper import compiled
    from hopper_on_a_cpu import launcher

    monkeypatch.setattr(compiled, "launch", launcher(request.getfixturevalue("library")))
    monkeypatch.setattr(compiled, "load", lambda *arguments: None)
    monkeypatch.setattr(compiled, "clusters", lambda name, device, blocks, threads: 132 // blocks)
    monkeypatch.setattr(libraries, "installed", lambda name: None)
    monkeypatch.setitem(sys.modules, "hopper_for_a_cpu", on_a_cpu())
    backends = {"reference": "dsv4core.backends.reference", "hopper": "hopper_for_a_cpu"}
    declare_backends(tmp_path, "hopper_for_a_cpu", backends)
    isolate(tmp_path, monkeypatch)
    return Subject("hopper", device=torch.device("cpu"))
