"""Whether the packages that a backend needs are installed, from metadata alone."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from dsv4core.api import Reason, Requirement


def requirement_reasons(requirements: Iterable[Requirement]) -> tuple[Reason, ...]:
    """One reason for each required package that is absent, a mere namesake, or of the wrong version."""
    reasons = (_reason(requirement) for requirement in requirements)
    return tuple(reason for reason in reasons if reason is not None)


def _reason(requirement: Requirement) -> Reason | None:
    install = f"Run `{requirement.install}`."
    needed = f"{requirement.distribution}{requirement.version}"
    found = _installed(requirement)
    if found is None:
        if not _importable(requirement.module):
            return Reason("package-missing", f"It needs {needed}, which is not installed.", install)
        # PyPI's `aiter` is not AMD's: both are imported as `aiter`.
        text = f"It needs {needed}, but the installed {requirement.module!r} is of another distribution."
        return Reason("package-wrong", text, f"Uninstall that and run `{requirement.install}`.")
    name, installed = found
    if requirement.version and not _fits(installed, requirement.version):
        text = f"It needs {needed}, and {name} {installed} is installed."
        return Reason("package-version", text, install)
    return None


def _installed(requirement: Requirement) -> tuple[str, str] | None:
    """The first of its distributions that is installed, and the version."""
    for name in (requirement.distribution, *requirement.alternatives):
        try:
            return name, version(name) or "of an unknown version"
        except PackageNotFoundError:
            continue
    return None


def _importable(module: str) -> bool:
    try:
        return find_spec(module.partition(".")[0]) is not None
    except ValueError:  # imported already, by something that left no __spec__
        return True


def _fits(installed: str, versions: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(versions).contains(Version(installed), prereleases=True)
    except InvalidVersion:  # not PEP 440: it may fit, but nobody can say so
        return False
