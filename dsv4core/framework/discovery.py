"""Which backends are installed, read from package metadata alone: nothing is imported."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.message import Message
from importlib.metadata import Distribution, distributions
from typing import cast

from dsv4core.api import PluginError, Reason
from dsv4core.framework.known import KNOWN_BACKENDS
from dsv4core.framework.switches import disabled, strict, warn_about_unknown_switches
from dsv4core.framework.wording import near_miss, one_line, warn_once

GROUP = "dsv4core.backends"


@dataclass(frozen=True)
class BackendRecord:
    """One installed backend, before anything of it is imported.

    Attributes:
        name: Entry-point name, which is also the backend's name in configs and commands.
        value: What the entry point names: `module` or `module:object`.
        distribution: The distribution that declares it.
        version: That distribution's version.
        core: The versions of dsv4core that it asks for, such as `<0.2,>=0.1`; empty where any will do.
        folder: Where that distribution's metadata lies.
        problem: Why it must not be loaded (`conflict`, `disabled` or `broken`), or None.
    """

    name: str
    value: str
    distribution: str
    version: str
    core: str = ""
    folder: str = ""
    problem: Reason | None = None

    @property
    def source(self) -> str:
        """Distribution and version, for people."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def title(self) -> str:
        """The subject of sentences about it."""
        return f"Backend {self.name!r} of {self.source}"

    @property
    def package(self) -> str:
        """The package whose code it is: `dsv4_plugin_acme` of `dsv4_plugin_acme.plugin:backend`."""
        module = self.value.partition(":")[0].strip()
        return module.rpartition(".")[0] or module


def discover(disable: Iterable[str] = ()) -> dict[str, BackendRecord]:
    """The installed backends by name, in alphabetical order.

    All distributions are read, because `importlib.metadata.entry_points()` keeps one distribution a name and
    a stale egg-info would hide the real one.

    Args:
        disable: Backends and distributions that must not be loaded, besides those of `DSV4_DISABLE`.

    Raises:
        PluginError: With `DSV4_STRICT=1`: a name is unusable or declared more than once.
    """
    warn_about_unknown_switches()
    declared: dict[str, list[BackendRecord]] = defaultdict(list)
    for distribution in distributions():
        for record in _records(distribution):
            declared[record.name].append(record)
    switched_off = dict.fromkeys(disable, "plugins.disable") | dict.fromkeys(disabled(), "DSV4_DISABLE")
    _warn_about_unknown_names(switched_off, declared)
    records = {name: _resolve(declared[name], switched_off) for name in sorted(declared)}
    for record in records.values():
        if strict() and record.problem is not None and record.problem.code != "disabled":
            raise PluginError(record.problem)
    return records


def _records(distribution: Distribution) -> list[BackendRecord]:
    try:
        # Only a file that names the group is parsed: other people's broken metadata is not ours to meet.
        if GROUP not in (distribution.read_text("entry_points.txt") or ""):
            return []
    except UnicodeDecodeError:
        return []
    folder = str(distribution.locate_file(""))
    try:
        identity = _identity(distribution)
        return [
            BackendRecord(entry_point.name, entry_point.value, *identity, folder)
            for entry_point in distribution.entry_points.select(group=GROUP)
        ]
    except Exception as error:
        if strict():
            raise
        warn_once(f"Backends that a distribution in {folder} declares cannot be read: {one_line(error)}.")
        return []


def _identity(distribution: Distribution) -> tuple[str, str, str]:
    """Name, version, and the versions of dsv4core that it asks for."""
    if not (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")):
        return "a distribution without METADATA", "", ""
    core = ",".join(filter(None, map(_core_specifier, distribution.requires or ())))
    found = cast(Message, distribution.metadata)  # its own lookup of what is missing is deprecated
    return found.get("Name") or "a distribution without a name", found.get("Version") or "", core


def _core_specifier(requirement: str) -> str:
    """What one `Requires-Dist` asks of dsv4core in this environment; empty where it is of another one."""
    if not requirement.lower().startswith("dsv4core"):
        return ""
    from packaging.requirements import Requirement

    parsed = Requirement(requirement)
    applies = parsed.marker is None or parsed.marker.evaluate({"extra": ""})
    return str(parsed.specifier) if applies and _canonical(parsed.name) == "dsv4core" else ""


def _warn_about_unknown_names(
    switched_off: Mapping[str, str], declared: Mapping[str, list[BackendRecord]]
) -> None:
    distributions = {record.distribution for records in declared.values() for record in records}
    known = {*declared, *KNOWN_BACKENDS, *distributions}
    canonical = set(map(_canonical, known))
    for name, where in switched_off.items():
        if _canonical(name) not in canonical:
            near = near_miss(name, known)
            advice = f"Did you mean {near!r}?" if near else "`dsv4 plugins` lists them."
            warn_once(f"{where} names {name!r}, which is no installed backend or distribution. {advice}")


def _resolve(records: list[BackendRecord], switched_off: Mapping[str, str]) -> BackendRecord:
    """One record for one name: the first on the path, with the problem that keeps it from being loaded."""
    first = records[0]
    by_canonical_name = {_canonical(name): (name, where) for name, where in switched_off.items()}
    kept = [record for record in records if _canonical(record.distribution) not in by_canonical_name]
    off = _canonical(first.name if kept else first.distribution)
    if off in by_canonical_name:
        name, where = by_canonical_name[off]
        text, fix = f"Backend {first.name!r} is disabled.", f"Take {name!r} out of {where}."
        return replace(first, problem=Reason("disabled", text, fix))
    first = kept[0]
    if not _is_usable(first.name):
        text = f"{first.distribution} declares a backend named {first.name!r}, which is not a usable name."
        fix = "Use an identifier, or identifiers with dots between them, and neither 'auto' nor a literal."
        return replace(first, problem=Reason("broken", text, fix))
    if not re.fullmatch(r"[\w.]+(\s*:\s*[\w.]+)?", first.value):
        text = f"{first.title} is declared as {first.value!r}, neither a module nor module:object."
        return replace(first, problem=Reason("broken", text, f"Repair or uninstall {first.distribution}."))
    if len({_canonical(record.distribution) for record in kept}) > 1:
        return replace(first, problem=_conflict(kept))
    if len({(record.version, record.value) for record in kept}) > 1:
        _report_copies(kept)
    return first


def _is_usable(name: str) -> bool:
    """Whether Hydra takes a name for a string. `vendor.backend` keeps apart what vendors call alike."""
    if name.lower() in ("auto", "true", "false", "null", "nan", "inf"):
        return False
    return re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name, re.ASCII) is not None


def _conflict(records: Sequence[BackendRecord]) -> Reason:
    places = " and ".join(sorted(_place(record) for record in records))
    other = max((record.distribution for record in records), key=_canonical)
    fix = f"Uninstall all but one, or switch one off, as by DSV4_DISABLE={other}."
    return Reason("conflict", f"Backend {records[0].name!r} is declared more than once: by {places}.", fix)


def _report_copies(records: Sequence[BackendRecord]) -> None:
    """One distribution that is there twice, as a stale egg-info leaves it."""
    places = " and ".join(map(_place, records))
    text = f"Backend {records[0].name!r} is installed more than once: by {places}."
    fix = "Uninstall all but one."
    if strict():
        raise PluginError(Reason("conflict", text, fix))
    warn_once(f"{text} The first on sys.path is used. {fix}")


def _place(record: BackendRecord) -> str:
    return f"{record.source} (as {record.value} in {record.folder})"


def _canonical(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
