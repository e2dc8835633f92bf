"""Runs the suite on one backend and says what came of it: by level, with what was covered."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from dsv4core.api import CAPABILITIES, ConfigError
from dsv4core.testing.pytest_plugin import KEY
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite.marks import LEVELS

Outcome = Literal["passed", "failed", "refused", "undeclared", "elsewhere", "large"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "refused", "undeclared", "elsewhere", "large")

Progress = Callable[[int, int], None]
"""Called with the checks that are done and those that there are."""


@dataclass(frozen=True)
class Checked:
    """What became of one check.

    Attributes:
        name: `test_name[parameters]`.
        level: One of `LEVELS`.
        outcome: `refused`: the backend turned the request down; `undeclared`: it needs a capability that the
            backend does not declare; `elsewhere`: this machine cannot show it; `large`: left out as asked.
        text: Why, unless it passed.
        reports: Public reports that it stands for.
        seen: Requests that the backend accepted in it.
    """

    name: str
    level: str
    outcome: Outcome
    text: str = ""
    reports: tuple[str, ...] = ()
    seen: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Conformance:
    """What became of all checks."""

    subject: Subject
    checks: tuple[Checked, ...]
    only: str | None = None

    @property
    def ok(self) -> bool:
        """Whether checks ran and none failed."""
        return bool(self.having("passed")) and not self.having("failed")

    @property
    def computed(self) -> bool:
        """Whether anything was computed: the contract alone can be checked on any machine."""
        return any(checked.level not in ("L0", "L1") for checked in self.having("passed"))

    @property
    def complete(self) -> bool:
        """Whether nothing was left out that this backend could show on another machine or with more time."""
        return self.only is None and not self.having("elsewhere", "large")

    def having(self, *outcomes: Outcome) -> list[Checked]:
        """The checks with one of these outcomes."""
        return [checked for checked in self.checks if checked.outcome in outcomes]

    def levels(self) -> dict[str, dict[str, int]]:
        """Counts of outcomes by level."""
        counts: dict[str, dict[str, int]] = {level: dict.fromkeys(OUTCOMES, 0) for level in LEVELS}
        for checked in self.checks:
            counts[checked.level][checked.outcome] += 1
        return counts

    def coverage(self) -> dict[str, list[Any]]:
        """What was computed in passed checks: layer kinds, heads, formats, page sizes, seams."""
        found: dict[str, set[Any]] = {}
        for checked in (own for own in self.having("passed") if own.level not in ("L0", "L1")):
            for seen in checked.seen:
                for key, value in seen.items():
                    found.setdefault(key, set()).update(value if isinstance(value, list) else [value])
        return {key: sorted(values) for key, values in found.items()}

    def capabilities(self) -> dict[str, str]:
        """Each capability: declared or not declared."""
        declared = self.subject.info.capabilities
        return {name: "declared" if name in declared else "not declared" for name in CAPABILITIES}

    def reports(self) -> tuple[set[str], set[str]]:
        """Public reports whose checks all passed, none of them left out, and all that were looked at."""
        everything = {report for checked in self.checks for report in checked.reports}
        left = {own for checked in self.checks if checked.outcome != "passed" for own in checked.reports}
        return everything - left, everything


def run_suite(
    name: str,
    overrides: Iterable[str] = (),
    quick: bool = False,
    only: str | None = None,
    progress: Progress | None = None,
) -> Conformance:
    """Check a backend on this machine.

    Args:
        name: The backend.
        overrides: `backend.<option>=…`, `device=…`, `dtype=…`.
        quick: Leave out cases of gigabytes or minutes.
        only: Checks whose names match this, as pytest's `-k` has it; None is all.
        progress: Called before the first check and after each.

    Raises:
        DSV4Error: The backend cannot be loaded, an override does not fit, or no check has such a name.
    """
    overrides = list(overrides)
    subject = Subject.configured(name, overrides)
    recorder = _Recorder(progress or (lambda done, total: None))
    words = ["--pyargs", "dsv4core.testing.suite", "--dsv4-backend", name]
    words += [word for override in overrides for word in ("--dsv4-override", override)]
    words += ["--dsv4-quick"] if quick else []
    words += [] if only is None else ["-k", only]
    # Not the configuration of whoever's folder this is, no cache in it, and no terminal but ours.
    words += ["-c", os.devnull, "--rootdir", os.path.dirname(__file__), "-p", "no:cacheprovider"]
    words += ["-p", "no:terminal", "-W", "ignore::pytest.PytestConfigWarning"]
    with _own_options():
        code = pytest.main(words, plugins=[recorder])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED or (only is not None and not recorder.total):
        raise ConfigError(f"No check is named like {only!r}; leave it out to see all.")
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"The suite ended with {code!r}; its output is above.")
    return Conformance(subject, tuple(recorder.checks), only)


@contextmanager
def _own_options() -> Iterator[None]:
    """Without the options that somebody keeps for other runs."""
    kept = os.environ.pop("PYTEST_ADDOPTS", None)
    try:
        yield
    finally:
        if kept is not None:
            os.environ["PYTEST_ADDOPTS"] = kept


@dataclass(eq=False)
class _Recorder:
    """A plugin of pytest that keeps what becomes of each check."""

    progress: Progress
    checks: list[Checked] = field(default_factory=list)
    total: int = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)
        self.progress(0, self.total)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            raise RuntimeError(f"The suite cannot be collected: {report.longrepr}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.checks.append(_checked(report))
            self.progress(len(self.checks), self.total)


def _checked(report: pytest.TestReport) -> Checked:
    properties: list[tuple[str, Any]] = report.user_properties
    noted = {key.removeprefix(f"{KEY}."): value for key, value in properties}
    outcome: Outcome = "passed" if report.passed else "failed"
    if report.skipped:
        outcome = noted.get("outcome", "failed")
    return Checked(
        name=report.nodeid.rpartition("::")[2],
        level=noted.get("level", "L0"),
        outcome=outcome,
        text=_text(report),
        reports=tuple(noted.get("reports", ())),
        seen=tuple(noted.get("seen", ())),
    )


def _text(report: pytest.TestReport) -> str:
    """One line of why."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):  # skipped: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    return " ".join(text.removeprefix("AssertionError: ").removeprefix("Failed: ").split())
