"""What a user sees of a defective backend, word for word: listed, chosen, passed over, switched off."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from terminal import Capture, error, explain

from dsv4core import __version__
from dsv4core.api import PluginError
from dsv4core.cli.main import main
from dsv4core.framework.discovery import discover
from dsv4core.framework.manager import load_backend
from dsv4core.testing.fakes import altered, install_backend

TITLE = "Backend 'bad' of fake-bad 1.0"
REPAIR = "Repair or uninstall fake-bad."
TRACE = "Repair or uninstall fake-bad; DSV4_STRICT=1 shows the traceback."
REASONS = "def dsv4_unsupported_reasons(request):\n    return []"
IMPORT_REASON = ("hookimpl,\n", "hookimpl, Reason,\n")
REFUSES = REASONS.replace("[]", "[Reason('q-heads', 'It serves 8 heads, not 16.', 'Use more ranks.')]")


@dataclass(frozen=True)
class Defect:
    """A defective backend named `bad`, and what is said about it.

    Attributes:
        install: Puts it into a folder.
        code: The reason's code.
        text: The reason's text; `{folder}` is that folder.
        fix: What to do.
        raised: The exception that DSV4_STRICT=1 lets through.
    """

    install: Callable[[Path], object]
    code: str
    text: str
    fix: str = REPAIR
    raised: type[BaseException] = PluginError

    def reason(self, folder: Path) -> str:
        return f"[{self.code}] {self.text.format(folder=folder)} {self.fix}"


def bad(*replacements: tuple[str, str], requires: str = "") -> Callable[[Path], object]:
    return lambda folder: install_backend(folder, "bad", altered(*replacements), requires=requires)


def source(text: str) -> Callable[[Path], object]:
    return lambda folder: install_backend(folder, "bad", text)


def twice(folder: Path) -> None:
    install_backend(folder, "bad", distribution="fake-bad")
    install_backend(folder, "bad", distribution="fake-worse", version="2.0")


PLAN_STEP = "@hookimpl\ndef dsv4_plan_step(kind_state, step):"
MODULE = "{folder}/fake_bad.py"
FAITHLESS = f"{TITLE} does not follow the contract: "
DEFECTS = {
    "import error": Defect(
        source("import kernels"),
        "broken",
        f"{TITLE} cannot be loaded: ModuleNotFoundError: No module named 'kernels' ({MODULE}, line 1).",
        TRACE,
        ModuleNotFoundError,
    ),
    "another exception": Defect(
        source("\n\nraise OSError('libcuda.so.1: cannot open')"),
        "broken",
        f"{TITLE} cannot be loaded: OSError: libcuda.so.1: cannot open ({MODULE}, line 3).",
        TRACE,
        OSError,
    ),
    "exit": Defect(
        source("raise SystemExit('no licence')"),
        "broken",
        f"{TITLE} cannot be loaded: SystemExit: no licence ({MODULE}, line 1).",
        TRACE,
    ),
    "misspelt hook": Defect(
        bad(("dsv4_o_proj", "dsv4_oproj")),
        "broken",
        FAITHLESS + "dsv4_oproj is no hook (did you mean dsv4_o_proj?); it does not implement dsv4_o_proj.",
    ),
    "missing hook": Defect(
        bad((PLAN_STEP, "def helper(kind_state, step):")),
        "broken",
        FAITHLESS + "it does not implement dsv4_plan_step.",
    ),
    "unmarked hook": Defect(
        bad((PLAN_STEP, PLAN_STEP.removeprefix("@hookimpl\n"))),
        "broken",
        FAITHLESS + "dsv4_plan_step is not marked with @hookimpl.",
    ),
    "wrong argument": Defect(
        bad((PLAN_STEP, PLAN_STEP.replace("step)", "batch)"))),
        "broken",
        FAITHLESS + "dsv4_plan_step takes batch, but its arguments are kind_state, step.",
    ),
    "options of the wrong class": Defect(
        bad(("class Options(BackendOptions)", "class Options")),
        "broken",
        f"{TITLE} has options of <class 'fake_bad.Options'>, which is no subclass of BackendOptions.",
    ),
    "wrong api": Defect(
        bad(("api=API_VERSION", "api=7"), requires="dsv4core>=0.1"),
        "api",
        f"{TITLE} was written for version 7 of the contract, and dsv4core {__version__} serves 0.",
        "Install a version of fake-bad that fits, or `pip install 'dsv4core>=0.1'`.",
    ),
    "another core": Defect(
        bad(requires="dsv4core<10,>=9"),
        "api",
        f"{TITLE} needs dsv4core<10,>=9, and this is dsv4core {__version__}.",
        "Install a version of fake-bad that fits, or `pip install 'dsv4core<10,>=9'`.",
    ),
    "two distributions": Defect(
        twice,
        "conflict",
        "Backend 'bad' is declared more than once: by fake-bad 1.0 (as fake_bad in {folder}) and "
        "fake-worse 2.0 (as fake_worse in {folder}).",
        "Uninstall all but one, or switch one off, as by DSV4_DISABLE=fake-worse.",
    ),
}


@pytest.fixture(params=DEFECTS)
def defect(request: pytest.FixtureRequest, folder: Path) -> Defect:
    """Beside the defective backend there is a good one."""
    install_backend(folder, "good")
    found = DEFECTS[request.param]
    found.install(folder)
    return found


def test_it_is_named_in_the_list(defect: Defect, folder: Path, capsys: Capture) -> None:
    assert main(["plugins", "--json"]) == 0
    captured = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(captured.out)}
    assert (rows["bad"]["status"], rows["bad"]["fix"]) == (defect.code, defect.fix)
    assert rows["bad"]["summary"] == defect.text.format(folder=folder)
    assert rows["good"]["status"] == "ok"
    assert captured.err == ""


def test_it_is_fatal_if_it_is_chosen(defect: Defect, folder: Path, capsys: Capture) -> None:
    assert error(capsys, "run", "device=cpu", "backend=bad") == (
        f"backend=bad cannot run this request: {defect.reason(folder)} "
        "What could run here, if you name it: good."
    )


def test_it_is_harmless_if_another_one_is_chosen(
    defect: Defect, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    assert explain(capsys, "backend=good")["chosen"] == "good"
    assert caplog.messages == []


def test_auto_passes_over_it_with_one_warning(
    defect: Defect, folder: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    assert explain(capsys, "backend.order.cpu=[bad,good]")["chosen"] == "good"
    assert caplog.messages == [
        f"backend=auto chose good (fake-good 1.0); passed over: bad: {defect.reason(folder).rstrip('.')}."
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_strict_raises(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_STRICT", "1")
    with pytest.raises(defect.raised):
        load_backend(discover()["bad"])


def test_it_can_be_switched_off(
    defect: Defect, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("DSV4_STRICT", "1")
    monkeypatch.setenv("DSV4_DISABLE", "bad")
    assert explain(capsys, "backend.order.cpu=[bad,good]")["chosen"] == "good"
    assert error(capsys, "run", "device=cpu", "backend=bad") == (
        "backend=bad cannot run this request: [disabled] Backend 'bad' is disabled. "
        "Take 'bad' out of DSV4_DISABLE. What could run here, if you name it: good."
    )
