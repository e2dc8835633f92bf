"""`backend=rocm_aiter` on a CPU: its own hooks, on a stub of AITER and the definitions of the core.

Where AMD's GPU and AITER are, the suite is run on the backend itself.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import stub_aiter
import torch
from dsv4_plugin_rocm_aiter import library, plugin, routes
from stub_aiter import ON_AMD, VERSIONS, Calls, Install, Stub

from dsv4core.api import hookimpl
from dsv4core.testing.fakes import declare_backends, isolate
from dsv4core.testing.subject import Subject

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # chosen before kernels are defined


def pytest_configure(config: pytest.Config) -> None:
    """NumPy, in which the interpreter computes, warns of infinities that kernels are meant to make."""
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


@hookimpl
def dsv4_backend_info():
    """On a CPU, without a library."""
    return replace(plugin.dsv4_backend_info(), platforms=("cpu",), requirements=())


STUBBED = ModuleType("stubbed")
vars(STUBBED).update({name: hook for name, hook in vars(plugin).items() if name.startswith("dsv4_")})
STUBBED.dsv4_backend_info = dsv4_backend_info


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Imports a stub as `aiter`, by chip and version; the backend on it is `rocm_aiter`."""

    def installed(arch: str, version: str = VERSIONS["amd-aiter"], **options: object) -> Subject:
        for name, module in stub_aiter.modules(arch, version).items():
            monkeypatch.setitem(sys.modules, name, module)
        library.missing.cache_clear()
        monkeypatch.setattr(plugin, "chip_of", lambda request: arch)
        monkeypatch.setattr(library, "installed", {**VERSIONS, "amd-aiter": version}.get)
        sys.modules["stubbed_aiter"] = STUBBED
        declare_backends(
            tmp_path,
            "stubbed",
            {"reference": "dsv4core.backends.reference", "rocm_aiter": "stubbed_aiter"},
        )
        isolate(tmp_path, monkeypatch)
        own = plugin.AiterOptions(**options) if options else None  # type: ignore[arg-type]
        return Subject("rocm_aiter", own, device=torch.device("cpu"))

    yield installed
    library.missing.cache_clear()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """How often each of AITER's functions is called."""
    counts: Calls = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for name in {symbol.name for symbol in routes.symbols()} & set(vars(Stub)):
        monkeypatch.setattr(Stub, name, counted(name, getattr(Stub, name)))
    return counts


@pytest.fixture
def dsv4(install: Install) -> Subject:
    """On gfx950, where AITER has most; on a machine of AMD's the backend itself."""
    if ON_AMD:
        return Subject("rocm_aiter", device=torch.device("cuda"))
    return install("gfx950")
