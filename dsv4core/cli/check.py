"""`dsv4 check NAME`: the conformance suite on one backend, on this machine."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dsv4core.api import ConfigError
from dsv4core.cli.output import show, show_json

MINUTE = 60.0
MOST_CAUSES = 12
"""Different failures that are printed."""

if TYPE_CHECKING:
    from dsv4core.testing.conformance import Checked, Conformance, Progress


def check(words: Sequence[str], quick: bool, only: str | None, deadline: str | None) -> int:
    """Check the backend that the first word names; the result is the exit code, 1 where a check fails.

    Args:
        words: The name, then overrides: `backend.<option>=…`, `device=…`, `dtype=…`, `json=true`.
        quick: Leave out cases of gigabytes or minutes.
        only: Checks whose names match this, as pytest's `-k` has it; None is all.
        deadline: Seconds that a check may take, as written; None is the suite's own.

    Raises:
        ConfigError: The deadline is no number of seconds, no name is given, an override is none of these, or
            pytest is not installed.
        DSV4Error: The backend is not installed or cannot be loaded.
    """
    name, overrides = _arguments(words)
    if any(find_spec(needed) is None for needed in ("pytest", "xdist")):
        raise ConfigError(
            "dsv4 check runs pytest with pytest-xdist, and they are not both installed; "
            "run `pip install 'dsv4core[check]'`."
        )
    from dsv4core.testing.conformance import DEADLINE, run_suite

    seconds = DEADLINE if deadline is None else _seconds(deadline)
    plain = [word for word in overrides if word != "json=true"]
    with _progress() as progress:
        found = run_suite(name, plain, quick, only, progress, seconds)
    if "json=true" in overrides:
        show_json(_plain(found))
    else:
        _print(found)
    return 0 if found.ok else 1


def _arguments(words: Sequence[str]) -> tuple[str, list[str]]:
    names = [word for word in words if "=" not in word]
    if len(names) != 1:
        raise ConfigError(
            f"dsv4 check takes one backend's name, and was given {' '.join(names) or 'none'}; "
            "write dsv4 check NAME."
        )
    overrides = [word for word in words if "=" in word]
    for word in overrides:
        if not word.startswith(("backend.", "device=", "dtype=", "json=")):
            raise ConfigError(
                f"dsv4 check takes no {word!r}; it takes backend.OPTION=…, device=…, dtype=…, --only TEXT, "
                "--quick, --deadline SECONDS and --json."
            )
    return names[0], overrides


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--deadline {text} is no number of seconds; write one, such as --deadline 600.")
    return seconds


def _plain(found: Conformance) -> dict[str, Any]:
    return {
        **_what(found),
        "ok": found.ok,
        "complete": found.complete,
        "levels": found.levels(),
        "capabilities": found.capabilities(),
        "coverage": found.coverage(),
        "reports": sorted(found.reports()[0]),
        "checks": [asdict(checked) for checked in found.checks],
    }


def _what(found: Conformance) -> dict[str, str]:
    from dsv4core.framework.platform import machine_of

    record, machine = found.subject.backend.record, machine_of(found.subject.device)
    return {
        "backend": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "platform": machine.platform,
        "arch": machine.arch,
        "dtype": found.subject.dtype,
    }


def _print(found: Conformance) -> None:
    what = _what(found)
    machine = f"{what['platform']} {what['arch']}".strip()
    show(f"{what['backend']} ({what['distribution']} {what['version']}) on {machine}, {what['dtype']}\n")
    show(_levels(found), *_left_out(found), "", _covered(found), *_failures(found))
    show(f"\n{_verdict(found, machine)}")


def _levels(found: Conformance) -> Table:
    from dsv4core.testing.conformance import OUTCOMES
    from dsv4core.testing.suite.marks import LEVELS

    table = Table("level", box=None, padding=(0, 2, 0, 0))
    for outcome in OUTCOMES:
        table.add_column("by core" if outcome == "core" else outcome, justify="right")
    for level, counts in found.levels().items():
        table.add_row(f"{level} {LEVELS[level]}", *(str(counts[outcome] or "-") for outcome in OUTCOMES))
    return table


def _failures(found: Conformance) -> Iterator[str]:
    """Failed checks, those whose texts differ in numbers only together, and how to see the first again."""
    causes = _by_text(found.having("failed"))
    for text, checks in list(causes.items())[:MOST_CAUSES]:
        again = f"dsv4 check {found.subject.name} --only '{checks[0].name}'"
        yield f"\nfailed: {text}\n  {_shortened(checks)}\n  {again}"
    if len(causes) > MOST_CAUSES:
        yield f"\nand {len(causes) - MOST_CAUSES} other causes, which --json tells."
    if causes:
        command = f"pytest --pyargs dsv4core.testing.suite --dsv4-backend {found.subject.name} -k 'NAME'"
        yield f"\nWith its traceback, and what it prints: {command}"


def _left_out(found: Conformance) -> Iterator[str]:
    """Why checks were left out, those of one reason together."""
    for text, checks in _by_text(found.having("refused", "undeclared", "elsewhere")).items():
        yield f"\n{checks[0].outcome}: {text}\n  {_shortened(checks)}"


def _by_text(checks: Sequence[Checked]) -> dict[str, list[Checked]]:
    found: dict[str, list[Checked]] = {}
    for checked in checks:
        cause = re.sub(r"\d+(\.\d+)?(e[-+]\d+)?", "#", checked.text)
        found.setdefault(cause, []).append(checked)
    return {own[0].text: own for own in found.values()}


def _shortened(checks: Sequence[Checked], most: int = 6) -> str:
    rest = len(checks) - most
    names = ", ".join(f"{checked.level} {checked.name}" for checked in checks[:most])
    return names + (f" and {rest} more" if rest > 0 else "")


def _covered(found: Conformance) -> Table:
    table = Table("covered", "", box=None, padding=(0, 2, 0, 0))
    for key, values in found.coverage().items():
        table.add_row(key.replace("_", " "), ", ".join(map(str, values)) or "none")
    for state in ("declared", "not declared"):
        names = [name for name, own in found.capabilities().items() if own == state]
        table.add_row(f"capabilities {state}", ", ".join(names) or "none")
    passed, everything = found.reports()
    table.add_row("public reports", f"{len(passed)} of {len(everything)}")
    return table


def _verdict(found: Conformance, machine: str) -> str:
    failed, name = len(found.having("failed")), found.subject.name
    if failed:
        return f"{name} does not conform: {_count(failed)} failed."
    if found.unproven():
        names = " and ".join(found.unproven())
        return f"{name} does not conform: it declares {names}, and refuses every check of it."
    if found.only is not None:
        return (
            f"{_count(len(found.having('passed', 'core')))} passed, of those that --only names; no verdict."
        )
    if not found.computed:
        return f"{name} cannot run on {machine}: only its contract was checked."
    large, elsewhere = len(found.having("large")), len(found.having("elsewhere"))
    left = [f"{_count(large)} left out as large"] if large else []
    left += [f"{_count(elsewhere)} for another machine or library"] if elsewhere else []
    return f"{name} conforms on {machine}" + (
        f", as far as it was checked: {' and '.join(left)}." if left else "."
    )


def _count(number: int) -> str:
    return f"{number} check" + ("" if number == 1 else "s")


@contextmanager
def _progress() -> Iterator[Progress]:
    """A progress bar on stderr; a line a minute where that is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(file=sys.stderr)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checks", total=None)
        said = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal said
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - said >= MINUTE:
                said = time.monotonic()
                print(f"dsv4: {done} of {total} checks", file=sys.stderr)

        yield progress
