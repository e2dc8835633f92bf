"""`backend=flashmla` on a CPU: its own hooks, on stubs of its libraries and the definitions of the core."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import stub_deep_gemm
import stub_flash_mla
import torch
from dsv4_plugin_flashmla import plugin

from dsv4core import libraries
from dsv4core.api import hookimpl
from dsv4core.testing.fakes import declare_backends, isolate
from dsv4core.testing.subject import Subject


@hookimpl
def dsv4_backend_info():
    """On a CPU, without a library."""
    info = plugin.dsv4_backend_info()
    return replace(info, platforms=("cpu",), requirements=())


STUBBED = ModuleType("stubbed")
vars(STUBBED).update({name: hook for name, hook in vars(plugin).items() if name.startswith("dsv4_")})
STUBBED.dsv4_backend_info = dsv4_backend_info


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stubs are imported as `flash_mla` and `deep_gemm`, and the backend on them is `flashmla`."""
    if not torch.cuda.is_available():
        monkeypatch.setitem(sys.modules, "flash_mla", stub_flash_mla)
        monkeypatch.setitem(sys.modules, "deep_gemm", stub_deep_gemm)
        monkeypatch.setattr(libraries, "deep_gemm_lacking", lambda probe: "")
        sys.modules["stubbed_flashmla"] = STUBBED
        declare_backends(
            tmp_path,
            "stubbed",
            {"reference": "dsv4core.backends.reference", "flashmla": "stubbed_flashmla"},
        )
        isolate(tmp_path, monkeypatch)


@pytest.fixture
def dsv4(stub: None) -> Subject:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Subject("flashmla", device=device)
