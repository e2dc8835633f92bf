"""Which backends are installed, read from package metadata alone: nothing is imported."""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distributions
from types import MappingProxyType

from dsv4core.api import Reason

GROUP = "dsv4core.backends"


@dataclass(frozen=True)
class BackendRecord:
    """One installed backend, before anything of it is imported.

    Attributes:
        name: Entry-point name, which is also the backend's name in configs and commands.
        value: What the entry point names: `module` or `module:object`.
        distribution: The distribution that declares it.
        version: That distribution's version.
        problem: Why it must not be loaded (`conflict`, `disabled` or `broken`), or None.
    """

    name: str
    value: str
    distribution: str
    version: str
    problem: Reason | None = None


@dataclass(frozen=True)
class KnownBackend:
    """A backend that exists but need not be installed: its distribution and one line about it."""

    distribution: str
    summary: str

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install {self.distribution}"


KNOWN_BACKENDS: Mapping[str, KnownBackend] = MappingProxyType(
    {
        "flashmla": KnownBackend(
            "dsv4-plugin-flashmla", "FlashMLA and DeepGEMM kernels for sm_90 and sm_100"
        ),
        "flashinfer": KnownBackend(
            "dsv4-plugin-flashinfer", "FlashInfer kernels for sm_90, sm_100 and sm_103"
        ),
        "rocm_aiter": KnownBackend("dsv4-plugin-rocm-aiter", "AITER kernels for gfx942 and gfx950"),
        "hopper": KnownBackend("dsv4-plugin-hopper", "warp-specialised kernels for sm_90"),
    }
)


def discover() -> dict[str, BackendRecord]:
    """The installed backends by name, in alphabetical order.

    All distributions are read, because `importlib.metadata.entry_points()` keeps one distribution a name and
    a stale egg-info would hide the real one.
    """
    declared: dict[str, list[BackendRecord]] = defaultdict(list)
    for distribution in distributions():
        # Only a file that names the group is parsed: other people's broken metadata is not ours to meet.
        if GROUP not in (distribution.read_text("entry_points.txt") or ""):
            continue
        identity = _identity(distribution)
        for entry_point in distribution.entry_points.select(group=GROUP):
            declared[entry_point.name].append(BackendRecord(entry_point.name, entry_point.value, *identity))
    disabled = {name.strip() for name in os.environ.get("DSV4_DISABLE", "").split(",")}
    return {name: _resolve(declared[name], name in disabled) for name in sorted(declared)}


def absent_reason(name: str, installed: Iterable[str]) -> Reason:
    """Why the backend `name` is not there, and how to get it or which name was probably meant."""
    known = KNOWN_BACKENDS.get(name)
    if known is not None:
        return Reason("package-missing", f"Backend {name!r} is not installed.", f"Run `{known.install}`.")
    names = sorted({"auto", *installed, *KNOWN_BACKENDS})
    near = difflib.get_close_matches(name, names, n=1)
    fix = f"Did you mean {near[0]!r}?" if near else f"The names are: {', '.join(names)}."
    return Reason("package-missing", f"No backend is named {name!r}.", fix)


def _identity(distribution: Distribution) -> tuple[str, str]:
    if distribution.read_text("METADATA") or distribution.read_text("PKG-INFO"):
        return distribution.metadata["Name"], distribution.version
    return "a distribution without METADATA", ""


def _resolve(records: list[BackendRecord], disabled: bool) -> BackendRecord:
    """One record for one name: the first on the path, with the problem that keeps it from being loaded."""
    first = records[0]
    if disabled:
        text, fix = f"Backend {first.name!r} is disabled.", "Take its name out of DSV4_DISABLE."
        return replace(first, problem=Reason("disabled", text, fix))
    if not first.name.isidentifier() or first.name == "auto":
        text = f"{first.distribution} declares a backend named {first.name!r}, which is not a usable name."
        return replace(first, problem=Reason("broken", text, "Use an identifier other than 'auto'."))
    # A stale egg-info may spell the distribution otherwise and have another version.
    owners = {(re.sub(r"[-_.]+", "-", r.distribution).lower(), r.value): r for r in reversed(records)}
    if len(owners) == 1:
        return first
    names = " and ".join(sorted(f"{r.distribution} {r.version} ({r.value})" for r in owners.values()))
    text = f"Backend {first.name!r} is declared more than once: {names}."
    return replace(first, problem=Reason("conflict", text, "Uninstall all but one."))
