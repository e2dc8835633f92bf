"""Runs the suite on one backend and says what came of it: by level, with what was covered."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pytest
from _pytest.mark.expression import Expression

from dsv4core.api import CAPABILITIES, ConfigError
from dsv4core.testing.pytest_plugin import KEY
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite import checks
from dsv4core.testing.suite.marks import LEVELS

Outcome = Literal["passed", "core", "failed", "refused", "undeclared", "elsewhere", "large"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

DEADLINE = 600.0
"""Seconds that a check may take. The longest take half a minute on a CPU of two cores."""
MOST_LOST = 5
"""Processes that may be lost before the rest of the checks is given up."""
AUTOLOAD = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"

Progress = Callable[[int, int], None]
"""Called with the checks that are done and those that there are."""


@dataclass(frozen=True)
class Checked:
    """What became of one check.

    Attributes:
        name: `test_name[parameters]`.
        level: One of `LEVELS`.
        outcome: `core`: it passed, and the core did what it is about; `refused`: the backend turned the
            request down; `undeclared`: it needs a capability that the backend does not declare;
            `elsewhere`: this machine cannot show it; `large`: left out as asked.
        text: Why, unless it passed.
        reports: Public reports that it stands for.
        needs: Capabilities without which it does not apply.
        seen: Requests that the backend accepted in it.
    """

    name: str
    level: str
    outcome: Outcome
    text: str = ""
    reports: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    seen: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Conformance:
    """What became of all checks."""

    subject: Subject
    checks: tuple[Checked, ...]
    only: str | None = None

    @property
    def ok(self) -> bool:
        """Whether checks ran, none failed, and no capability is declared of which every check was refused."""
        return bool(self.having("passed", "core")) and not self.having("failed") and not self.unproven()

    def unproven(self) -> list[str]:
        """Capabilities that are declared and of which every check was refused."""
        found = []
        for name in sorted(self.subject.info.capabilities):
            outcomes = {checked.outcome for checked in self.checks if name in checked.needs}
            if outcomes == {"refused"}:
                found.append(name)
        return found

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
        passed = self.having("passed", "core")
        left = {own for checked in self.checks if checked not in passed for own in checked.reports}
        return everything - left, everything


def run_suite(
    name: str,
    overrides: Iterable[str] = (),
    quick: bool = False,
    only: str | None = None,
    progress: Progress | None = None,
    deadline: float = DEADLINE,
) -> Conformance:
    """Check a backend on this machine.

    Checks run in a process of their own: where it dies, hangs or loses its device, the check at hand has
    failed, and the others go on in a new process.

    Args:
        name: The backend.
        overrides: `backend.<option>=…`, `device=…`, `dtype=…`.
        quick: Leave out cases of gigabytes or minutes.
        only: Checks whose names match this, as pytest's `-k` has it; None is all.
        progress: Called before the first check and after each.
        deadline: Seconds that a check may take.

    Raises:
        DSV4Error: The backend cannot be loaded, an override does not fit, or no check has such a name.
    """
    overrides = list(overrides)
    if only is not None:
        _check_expression(only)
    subject = Subject.configured(name, overrides)
    recorder = _Recorder(progress or (lambda done, total: None), deadline)
    words = ["--pyargs", "dsv4core.testing.suite", "--dsv4-backend", name, "--dsv4-deadline", str(deadline)]
    words += [word for override in overrides for word in ("--dsv4-override", override)]
    words += ["--dsv4-quick"] if quick else []
    words += [] if only is None else ["-k", only]
    # Not the configuration of whoever's folder this is, no cache in it, and no terminal but ours.
    words += ["-c", os.devnull, "--rootdir", os.path.dirname(__file__), "-p", "no:cacheprovider"]
    words += ["-p", "no:terminal", "-W", "ignore::pytest.PytestConfigWarning"]
    # A process that is lost leaves what it prints on stderr itself, not in pytest's buffers.
    words += ["--capture", "sys", "-p", "no:faulthandler"]
    words += ["-p", "dsv4core.testing.pytest_plugin", "-p", "xdist", "-n", "1"]
    words += ["--max-worker-restart", str(MOST_LOST)]
    with _own_plugins():
        code = pytest.main(words, plugins=[recorder])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED or (only is not None and not recorder.names):
        raise ConfigError(f"No check is named like {only!r}; leave it out to see all.")
    if code == pytest.ExitCode.INTERRUPTED and recorder.lost <= MOST_LOST:
        raise KeyboardInterrupt
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        raise RuntimeError(f"The suite ended with {code!r}; its output is above.")
    return Conformance(subject, tuple(recorder.all_checks()), only)


def _check_expression(only: str) -> None:
    try:
        Expression.compile(only)
    except SyntaxError as error:
        raise ConfigError(
            f"--only {only!r} is none of pytest's expressions ({error}); write a name's part, or parts with "
            "`and`, `or` and `not`."
        ) from error


@contextmanager
def _own_plugins() -> Iterator[None]:
    """Without the options and plugins that somebody keeps for other runs."""
    kept = os.environ.pop("PYTEST_ADDOPTS", None), os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "1"
    try:
        yield
    finally:
        del os.environ[AUTOLOAD]
        for name, value in zip(("PYTEST_ADDOPTS", AUTOLOAD), kept, strict=True):
            if value is not None:
                os.environ[name] = value


class _Recorder:
    """A plugin of pytest that keeps what becomes of each check."""

    def __init__(self, progress: Progress, deadline: float) -> None:
        self.progress, self.deadline = progress, deadline
        self.names: list[str] = []
        self.lost = 0
        self._checks: dict[str, Checked] = {}
        self._started = 0.0

    def all_checks(self) -> Iterator[Checked]:
        """Every check, those that were never reached included."""
        for name in self.names:
            yield self._checks.get(name) or _named(
                name, "failed", f"It was not run: the process of the checks was lost {MOST_LOST + 1} times."
            )

    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.names = [_name(node) for node in ids]
        self.progress(len(self._checks), len(self.names))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            raise RuntimeError(f"The suite cannot be collected: {report.longrepr}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = _name(report.nodeid)
        before = self._checks.get(name)
        if report.when == CRASHED:
            self.lost += 1
            if before is None or before.outcome != "failed":  # what was lost is worth more than what passed
                self._checks[name] = self._lost(name)
        elif before is None and (report.when == "call" or not report.passed):
            self._checks[name] = _checked(report)
        self.progress(len(self._checks), len(self.names))

    def _lost(self, name: str) -> Checked:
        if time.monotonic() - self._started >= 0.9 * self.deadline:  # two processes' clocks
            text = f"It hangs: it had not ended after {self.deadline:.0f} s. Where it was is printed above."
        else:
            text = "The process died of it, as by a fault in a kernel library; what it printed is above."
        return _named(name, "failed", text)


CRASHED = "???"
"""What xdist reports as the phase in which a process died."""


def _name(nodeid: str) -> str:
    return nodeid.rpartition("::")[2]


def _named(name: str, outcome: Outcome, text: str, seen: Iterable[dict[str, Any]] = ()) -> Checked:
    (mark,) = (own for own in checks()[name.partition("[")[0]].pytestmark if own.name == KEY)
    marks = mark.kwargs
    return Checked(name, marks["level"], outcome, text, marks["reports"], marks["needs"], tuple(seen))


def _checked(report: pytest.TestReport) -> Checked:
    properties: list[tuple[str, Any]] = report.user_properties
    noted = {key.removeprefix(f"{KEY}."): value for key, value in properties}
    outcome: Outcome = "failed"
    if not report.failed:
        outcome = noted.get("outcome", "failed" if report.skipped else "passed")
    return _named(_name(report.nodeid), outcome, _text(report), noted.get("seen", ()))


def _text(report: pytest.TestReport) -> str:
    """One line of why."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):  # skipped: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    # Without what pytest adds of the expression, and without modules of exceptions.
    text = re.sub(r"^(AssertionError|Failed): ", "", text).partition("\nassert ")[0]
    return " ".join(re.sub(r"^[\w.]+\.(\w+: )", r"\1", text).split())
