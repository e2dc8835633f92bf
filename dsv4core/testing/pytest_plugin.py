"""pytest's side of the conformance suite: options, the backend's fixture, refusals.

pytest loads it in every session on a machine with dsv4core, so nothing heavy is imported before a check runs.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dsv4core.testing.subject import Subject

KEY = "dsv4"
"""Under it a report's `user_properties` hold what became of a check."""

_SUBJECT = pytest.StashKey["Subject"]()
_STDERR = pytest.StashKey[int]()

pytest.register_assert_rewrite("dsv4core.testing.suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The suite's options."""
    group = parser.getgroup("dsv4core", "conformance of a backend of dsv4core")
    group.addoption("--dsv4-backend", metavar="NAME", help="the backend that the suite checks")
    group.addoption(
        "--dsv4-override",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="backend.OPTION=…, device=… or dtype=…, as for dsv4 run",
    )
    group.addoption("--dsv4-quick", action="store_true", help="leave out cases of gigabytes or minutes")
    group.addoption(
        "--dsv4-deadline",
        metavar="SECONDS",
        type=float,
        help="end the process where a check takes longer; without it, a hang is waited for",
    )
    parser.addini("dsv4_backend", "the backend that the suite of dsv4core checks", default="")


def pytest_configure(config: pytest.Config) -> None:
    """The suite's markers."""
    config.addinivalue_line("markers", "dsv4(level, core, needs, reports): a check of dsv4core's suite")
    if config.getoption("--dsv4-deadline") is not None:
        config.stash[_STDERR] = os.dup(2)
    config.addinivalue_line("markers", "dsv4_large: takes gigabytes or minutes; --dsv4-quick leaves it out")


@pytest.fixture
def dsv4(pytestconfig: pytest.Config) -> Subject:
    """The backend that the suite checks, with nothing seen of it yet."""
    if _SUBJECT not in pytestconfig.stash:
        pytestconfig.stash[_SUBJECT] = _configured(pytestconfig)
    subject = pytestconfig.stash[_SUBJECT]
    subject.seen.clear()
    return subject


def _configured(config: pytest.Config) -> Subject:
    from dsv4core.api import DSV4Error
    from dsv4core.testing.subject import Subject

    name = config.getoption("--dsv4-backend") or config.getini("dsv4_backend")
    if not name:
        pytest.fail(
            "No backend is named; run pytest with --dsv4-backend NAME, or write dsv4_backend = NAME into "
            "the configuration of pytest.",
            pytrace=False,
        )
    try:
        return Subject.configured(name, config.getoption("--dsv4-override"))
    except DSV4Error as error:
        pytest.fail(str(error), pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out large cases, if asked."""
    mark = item.get_closest_marker("dsv4")
    if mark is None:
        return
    if item.config.getoption("--dsv4-quick") and item.get_closest_marker("dsv4_large"):
        _leave_out(item, "large", "it is large, and --dsv4-quick was given")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """End the process where a check hangs, or has lost the device for all checks that follow."""
    deadline = item.config.getoption("--dsv4-deadline")
    if deadline is None:
        return (yield)
    # Also where the GIL is held, and to the real stderr: pytest's own is lost with the process.
    faulthandler.dump_traceback_later(deadline, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if _device_is_lost():
            os._exit(1)


def _device_is_lost() -> bool:
    """Whether an error of a kernel has spoilt this process, so that every later call fails with it."""
    try:
        _synchronize()
    except RuntimeError:
        return True
    return False


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip what the backend does not declare or turns down; fail where it has to serve."""
    mark = item.get_closest_marker("dsv4")
    subject = getattr(item, "funcargs", {}).get("dsv4")
    if mark is None or subject is None:
        return (yield)
    from dsv4core.testing.subject import Elsewhere, LeftToCore, Refused

    missing = sorted(set(mark.kwargs["needs"]) - subject.info.capabilities)
    if missing:
        _leave_out(item, "undeclared", f"it does not declare {', '.join(missing)}")
    try:
        result = yield
        if subject.device.type == "cuda":
            _synchronize()  # a kernel's error is this check's, not the next one's
    except Refused as refused:
        if refused.defect or (mark.kwargs["core"] and not refused.elsewhere):
            pytest.fail(f"It has to serve this, and refused it: {refused}", pytrace=False)
        _leave_out(item, "elsewhere" if refused.elsewhere else "refused", str(refused))
    except Elsewhere as elsewhere:
        _leave_out(item, "elsewhere", str(elsewhere))
    except LeftToCore as left:
        _leave_out(item, "core", str(left))
    else:
        if mark.kwargs["owned"] and not _owns(subject, mark.kwargs["owned"]):
            _note(item, "outcome", "core")
    finally:
        _note(item, "seen", [dict(seen) for seen in subject.seen])
    return result


def _owns(subject: Subject, operations: tuple[str, ...]) -> bool:
    return any(set(operations) & set(seen["own_ops"]) for seen in subject.seen)


def _note(item: pytest.Item, key: str, value: Any) -> None:
    item.user_properties.append((f"{KEY}.{key}", value))


def _leave_out(item: pytest.Item, why: str, text: str) -> None:
    _note(item, "outcome", why)
    pytest.skip(text)
