"""Backends that exist only as files: a module and a folder of package metadata, made in a millisecond."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4core.framework import discovery
from dsv4core.framework.wording import warn_once

if TYPE_CHECKING:
    import pytest

FAKE_BACKEND = """\
from dataclasses import dataclass

from dsv4core.api import (
    API_VERSION,
    AttentionOutput,
    BackendInfo,
    BackendOptions,
    KVCacheFormat,
    KVCacheLayout,
    KVCachePart,
    LayerPlan,
    hookimpl,
)


@dataclass
class Options(BackendOptions):
    workspace_mib: int = 64


@hookimpl
def dsv4_backend_info():
    return BackendInfo(
        api=API_VERSION,
        options=Options,
        platforms=("cpu",),
        summary="computes nothing",
        capabilities=frozenset(),
    )


@hookimpl
def dsv4_unsupported_reasons(request):
    return []


@hookimpl
def dsv4_resolve_kv_cache(request):
    row = KVCacheFormat("bf16", (KVCachePart("row", "bfloat16", 512),))
    return KVCacheLayout(row, row, row, row)


@hookimpl
def dsv4_plan_layer(layer):
    return LayerPlan(padded_q_heads=layer.num_heads, q_dtype="bfloat16", own_ops=frozenset())


@hookimpl
def dsv4_init_layer_buffers(layer, weights):
    return ("layer", layer.index, weights)


@hookimpl
def dsv4_init_step_buffers(kind, request):
    return ("kind", kind.name, request.limits)


@hookimpl
def dsv4_plan_step(kind_state, step):
    return None


@hookimpl
def dsv4_forward_mqa(state, q, apply_sink, positions, want_lse, layer):
    return AttentionOutput((state, layer.index, q, positions, want_lse, apply_sink))


@hookimpl
def dsv4_o_proj(layer, state, attention, positions):
    return (layer.index, state, attention, positions)
"""
"""A backend that follows the contract, imports no torch and computes nothing. Break it with `altered`."""


def altered(*replacements: tuple[str, str], source: str = FAKE_BACKEND) -> str:
    """The text of a backend with replacements made.

    Raises:
        ValueError: A text to be replaced is not there, so that the result would prove nothing.
    """
    for old, new in replacements:
        if old not in source:
            raise ValueError(f"{old!r} is not in the source of the backend that is to be altered.")
        source = source.replace(old, new)
    return source


def install_backend(
    folder: Path,
    name: str,
    source: str = FAKE_BACKEND,
    *,
    distribution: str = "",
    version: str = "1.0",
    requires: str = "",
) -> None:
    """Put a backend into `folder`, where discovery finds it once that folder is on `sys.path`.

    Args:
        folder: Where the module and its metadata go.
        name: The backend's name.
        source: The text of its module.
        distribution: Who declares it; by default `fake-<name>`.
        version: The distribution's version.
        requires: What it requires of another distribution, such as `dsv4core<0.2`.
    """
    distribution = distribution or f"fake-{name}"
    module = distribution.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    declare_backends(folder, distribution, {name: module}, version=version, requires=requires)


def declare_backends(
    folder: Path, distribution: str, backends: Mapping[str, str], *, version: str = "1.0", requires: str = ""
) -> None:
    """Write the metadata of a distribution that declares backends whose code lies elsewhere.

    Args:
        folder: Where the metadata go.
        distribution: Its name.
        backends: What each backend's name stands for: `module` or `module:object`.
        version: The distribution's version.
        requires: What it requires of another distribution, such as `dsv4core<0.2`.
    """
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requires}"] if requires else []
    (metadata / "METADATA").write_text("\n".join(lines) + "\n")
    entries = "".join(f"{name} = {value}\n" for name, value in backends.items())
    (metadata / "entry_points.txt").write_text(f"[dsv4core.backends]\n{entries}")


def isolate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test, make the backends in `folder` the only ones that discovery finds, and importable."""
    monkeypatch.setattr(discovery, "distributions", lambda: distributions(path=[str(folder)]))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("DSV4_DISABLE", raising=False)
    monkeypatch.delenv("DSV4_STRICT", raising=False)
    warn_once.cache_clear()
    for name in [name for name in sys.modules if name.startswith("fake_")]:
        del sys.modules[name]
