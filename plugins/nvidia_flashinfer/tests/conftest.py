"""`backend=flashinfer` on a CPU: its own hooks, on a stub of TRTLLM-gen and the definitions of the core."""

from __future__ import annotations

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


@hookimpl
def dsv4_backend_info():
    """On a CPU, without a library."""
    return replace(plugin.dsv4_backend_info(), platforms=("cpu",), requirements=())


STUBBED = ModuleType("stubbed")
vars(STUBBED).update({name: hook for name, hook in vars(plugin).items() if name.startswith("dsv4_")})
STUBBED.dsv4_backend_info = dsv4_backend_info


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub is imported as `flashinfer`, and the backend on it is `flashinfer`."""
    for name, module in stub_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "stubbed_flashinfer", STUBBED)
    monkeypatch.setattr(libraries, "installed", lambda name: None)
    declare_backends(
        tmp_path,
        "stubbed",
        {"reference": "dsv4core.backends.reference", "flashinfer": "stubbed_flashinfer"},
    )
    isolate(tmp_path, monkeypatch)


@pytest.fixture
def dsv4(stub: None) -> Subject:
    return Subject("flashinfer", device=torch.device("cpu"))
