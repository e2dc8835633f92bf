"""Which AITER is installed, and which of its symbols: from metadata, first. Nothing is imported with this.

PyPI's `amd-aiter` ends at 0.1.7 and has no kernel of DeepSeek-V4; PyPI's `aiter` is a library of iterators.
AMD's users have AITER from images, from releases on GitHub, or built from source.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dsv4core.api import Reason, Requirement
from dsv4core.api.selection import Probe
from dsv4core.framework.kernels import TRITON
from dsv4core.libraries import installed

DISTRIBUTION, LEAST = "amd-aiter", "0.1.18"
INSTALL = (
    "AITER_USE_SYSTEM_TRITON=1 pip install --no-build-isolation "
    "'amd-aiter @ git+https://github.com/ROCm/aiter@v0.1.20.post1'"
)
"""From source, beside the installed ROCm, torch and Triton: without the variable it brings a Triton."""
SOURCES = (
    "AMD's images (rocm/vllm-dev, rocm/atom) have all three; the releases of github.com/ROCm/aiter have "
    "AITER, which pins FlyDSL"
)
REQUIREMENT = Requirement("aiter", DISTRIBUTION, INSTALL, f">={LEAST}")
TRITON_ONLY = "AITER_TRITON_ONLY"
"""The variable with which AITER has its Triton kernels alone: without it, an import needs ROCm."""


@dataclass(frozen=True)
class Aiter:
    """An installed AITER, as far as it was looked at.

    Attributes:
        version: Its version, None where it is not installed.
        flydsl: FlyDSL's, of which each AITER needs one version.
        triton: Triton's.
        triton_only: Whether `AITER_TRITON_ONLY=1` leaves everything out that is not Triton's.
        missing: What a symbol and its parameters lack, empty where nothing is; None where nobody looked.
    """

    version: str | None
    flydsl: str | None = None
    triton: str | None = None
    triton_only: bool = False
    missing: Callable[[str, tuple[str, ...]], str] | None = None

    @property
    def versions(self) -> str:
        """The three that have to fit each other, in a line."""
        named = {DISTRIBUTION: self.version, "flydsl": self.flydsl, "triton": self.triton}
        return ", ".join(f"{name} {own or '(not installed)'}" for name, own in named.items())


def found(probe: Probe) -> Aiter:
    """The AITER of this process; its symbols are imported where the probe is `host`."""
    return Aiter(
        installed(DISTRIBUTION),
        installed("flydsl"),
        next(filter(None, map(installed, (TRITON.distribution, *TRITON.alternatives))), None),
        os.environ.get(TRITON_ONLY) == "1",
        missing if probe == "host" else None,
    )


def reasons(probe: Probe) -> Iterator[Reason]:
    """Why AITER cannot be used; where it is absent or too old, what is here, and who brings all of it."""
    version = installed(DISTRIBUTION)
    if version is None:
        yield Reason("package-missing", f"Here are {found(probe='static').versions}.", f"{SOURCES}.")
    elif not _is_of_amd():
        text = f"{DISTRIBUTION} {version} is installed, and the files of `aiter` are another project's."
        fix = f"Run `pip uninstall aiter {DISTRIBUTION}`, then `{INSTALL}`."
        yield Reason("package-wrong", text, fix)
    elif probe == "static":
        if not fits(version, LEAST, None):
            yield Reason("package-version", f"Here are {found(probe).versions}.", f"{SOURCES}.")
    else:
        yield from _rocm_reasons(version)


def _rocm_reasons(version: str) -> Iterator[Reason]:
    """Why an import fails, or what it gives cannot run here."""
    import torch

    if torch.version.hip is None:
        text = f"torch {torch.__version__} is not built for ROCm, whose kernels AITER's are."
        yield Reason("package-version", text, "Install PyTorch's ROCm build, or use one of AMD's images.")
        return
    try:
        import_module("aiter")
    except Exception as error:  # RuntimeError without ROCm's files, ImportError of another torch
        text = f"{DISTRIBUTION} {version} cannot be imported: {type(error).__name__}: {error}."
        fix = (
            f"AITER needs ROCm's files, a compiler, and fitting versions; these are {found('host').versions}."
        )
        yield Reason("artifact-missing", text, f"{fix} {SOURCES}.")


def _is_of_amd() -> bool:
    """Whether `aiter` has AMD's Triton kernels: looked up, and not imported."""
    try:
        spec = find_spec("aiter")
    except ValueError:  # imported already, by something that left no __spec__
        return True
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any((Path(folder) / "ops" / "triton").is_dir() for folder in folders)


def fits(version: str, since: str, before: str | None) -> bool:
    """Whether a version is of a range; one that is not PEP 440's may be, and nobody can say so."""
    from packaging.version import InvalidVersion, Version

    try:
        own = Version(version)
    except InvalidVersion:
        return False
    return own >= Version(since) and (before is None or own < Version(before))


@cache
def missing(target: str, parameters: tuple[str, ...]) -> str:
    """What a symbol of the installed AITER lacks, by its signature; empty where it is as it is called.

    Args:
        target: `module.function`.
        parameters: What is passed by name, or a kernel's arguments.
    """
    module, _, name = target.rpartition(".")
    try:
        function = getattr(import_module(module), name)
    except Exception as error:  # an extension that is not compiled, another Triton, a symbol that moved
        return f"cannot be imported: {type(error).__name__}: {error}"
    lacking = [own for own in parameters if own not in argument_names(function)]
    return f"has no {', '.join(lacking)}" if lacking else ""


def argument_names(function: Any) -> list[str]:
    """Of a function, or of a kernel of Triton, tuned or not."""
    while not hasattr(function, "arg_names") and hasattr(function, "fn"):
        function = function.fn
    if hasattr(function, "arg_names"):
        return list(function.arg_names)
    return list(inspect.signature(function).parameters)
