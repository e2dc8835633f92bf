"""What a user sees when a backend cannot run: each rule of selection and failure, word for word."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsv4core import __version__
from dsv4core.api import REASON_CODES, Limits, PluginError, Reason, Request
from dsv4core.cli.main import main
from dsv4core.framework import watchdog
from dsv4core.framework.discovery import discover
from dsv4core.framework.manager import load_backend
from dsv4core.model.shapes import PRESETS
from dsv4core.testing.fakes import FAKE_BACKEND, altered, install_backend

Capture = pytest.CaptureFixture[str]
TITLE = "Backend 'bad' of fake-bad 1.0"
REPAIR = "Repair or uninstall fake-bad; DSV4_STRICT=1 shows the traceback."
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
        raised=ModuleNotFoundError,
    ),
    "another exception": Defect(
        source("\n\nraise OSError('libcuda.so.1: cannot open')"),
        "broken",
        f"{TITLE} cannot be loaded: OSError: libcuda.so.1: cannot open ({MODULE}, line 3).",
        raised=OSError,
    ),
    "exit": Defect(
        source("raise SystemExit('no licence')"),
        "broken",
        f"{TITLE} cannot be loaded: SystemExit: no licence ({MODULE}, line 1).",
        raised=SystemExit,
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
        "Backend 'bad' is declared more than once: by fake-bad 1.0 (in {folder}) as fake_bad and "
        "fake-worse 2.0 (in {folder}) as fake_worse.",
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


def explain(capsys: Capture, *words: str, code: int = 0) -> dict[str, object]:
    assert main(["explain", "device=cpu", "--json", *words]) == code
    report: dict[str, object] = json.loads(capsys.readouterr().out)
    return report


def error(capsys: Capture, *words: str) -> str:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dsv4: ")
    assert captured.err.endswith(".\n")
    return captured.err.removeprefix("dsv4: ").removesuffix("\n")


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


def test_what_plugins_print_is_no_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    loud = altered((REASONS, REASONS.replace("return", "print('asked'); return")))
    install_backend(folder, "good", "print('imported')\n" + loud)
    assert explain(capsys, "backend=good")["chosen"] == "good"
    assert main(["plugins", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "good"
    monkeypatch.setenv("COMP_LINE", "dsv4 run backend=good backend.")
    sys.modules.pop("fake_good")
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out == "backend.workspace_mib=\n"


def test_a_probe_that_exits_is_a_reason(folder: Path, capsys: Capture) -> None:
    exits = REASONS.replace("return []", "raise SystemExit(3)")
    install_backend(folder, "bad", altered((REASONS, exits)))
    install_backend(folder, "good")
    assert explain(capsys, "backend.order.cpu=[bad,good]")["chosen"] == "good"
    report = explain(capsys, "backend=bad", code=2)
    assert report["decisions"][0]["reasons"][0]["text"].startswith("Its checks raised SystemExit: 3 (")  # type: ignore[index]


def test_a_hanging_import_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE", 0.1)
    install_backend(folder, "bad", "import time; time.sleep(0.4)\n" + FAKE_BACKEND)
    assert main(["plugins"]) == 0
    assert capsys.readouterr().err == (
        "dsv4: Importing backend 'bad' of fake-bad 1.0 has taken 0.1 s so far. If it hangs, interrupt it and "
        "start again with DSV4_DISABLE=bad.\n"
    )


def test_a_named_backend_gives_its_reasons_and_is_never_replaced(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "bad", altered((REASONS, REFUSES), IMPORT_REASON))
    install_backend(folder, "good")
    words = ["device=cpu", "backend=bad", "backend.workspace_mib=3"]
    assert error(capsys, "run", *words) == (
        "backend=bad cannot run this request: [q-heads] It serves 8 heads, not 16. Use more ranks. "
        "What could run here, if you name it: good."
    )
    report = explain(capsys, *words, code=2)
    reason = {"code": "q-heads", "text": "It serves 8 heads, not 16.", "fix": "Use more ranks."}
    assert report["decisions"] == [
        {"backend": "bad", "verdict": "rejected", "reasons": [reason]},
        {"backend": "good", "verdict": "could-run", "reasons": []},
    ]


ABSENT = [
    ("flashmla", "Backend 'flashmla' is not installed. Run `pip install dsv4-plugin-flashmla`."),
    ("flashmal", "No backend is named 'flashmal'. Did you mean 'flashmla'?"),
    (
        "cutlass",
        "No backend is named 'cutlass'. The names are: auto, flashinfer, flashmla, good, hopper, rocm_aiter.",
    ),
]


@pytest.mark.parametrize(("name", "text"), ABSENT)
def test_an_absent_backend(folder: Path, capsys: Capture, name: str, text: str) -> None:
    install_backend(folder, "good")
    assert error(capsys, "run", "device=cpu", f"backend={name}") == (
        f"backend={name} cannot run this request: [package-missing] {text} "
        "What could run here, if you name it: good."
    )


def test_auto_says_what_it_chose_and_what_it_passed_over_in_one_line(
    folder: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    install_backend(folder, "bad", altered((REASONS, REFUSES), IMPORT_REASON))
    install_backend(folder, "good")
    install_backend(folder, "other")
    caplog.set_level(logging.INFO)
    logging.getLogger("dsv4core").setLevel(logging.INFO)
    with caplog.at_level(logging.INFO, logger="dsv4core.framework.selection"):
        explain(capsys, "backend.order.cpu=[flashmla,bad,good]")
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert caplog.messages == [
        "backend=auto chose good (fake-good 1.0); passed over: "
        "flashmla: [package-missing] Backend 'flashmla' is not installed. "
        "Run `pip install dsv4-plugin-flashmla`; "
        "bad: [q-heads] It serves 8 heads, not 16. Use more ranks; "
        "other: [not-in-order] It is installed, but auto does not try it. Ask for backend=other."
    ]


def test_auto_finds_nothing_on_a_gpu_that_no_kernel_is_for(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "reference")
    assert main(["explain", "request.arch=sm_120"]) == 2
    assert " ".join(capsys.readouterr().out.split()) == (
        "tiny on cuda sm_120 (as asked) backend verdict reasons "
        "reference rejected [not-in-order] It is installed, but auto does not try it. "
        "Ask for backend=reference. Not the defaults: request.arch=sm_120 "
        "Nothing was chosen. Name a backend with backend=NAME, or list some in backend.order."
    )


def test_installing_a_package_changes_nothing(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "reference")
    before = explain(capsys)
    install_backend(folder, "acme")
    after = explain(capsys)
    assert (before["chosen"], after["chosen"]) == ("reference", "reference")
    assert before["plan"] == after["plan"]


def test_the_order_may_depend_on_machine_and_heads(folder: Path, capsys: Capture) -> None:
    for name in ("any", "gpu", "hopper", "narrow"):
        install_backend(
            folder, name, altered(('("cpu",)', '("cuda",)'), ("frozenset(),", "TENSOR_PARALLEL,"))
        )
        module = folder / f"fake_{name}.py"
        module.write_text("TENSOR_PARALLEL = frozenset({'tensor-parallel'})\n" + module.read_text())
    orders = [
        "backend.order.cuda=[any]",
        "+backend.order.cuda_heads_8=[gpu]",
        "backend.order.sm_90=[hopper]",
        "+backend.order.sm_90_heads_8=[narrow]",
    ]
    chosen = {
        (arch, ranks): explain(capsys, *orders, f"request.arch={arch}", f"request.tensor_parallel={ranks}")[
            "chosen"
        ]
        for arch in ("sm_80", "sm_90")
        for ranks in (1, 2)
    }
    assert chosen == {
        ("sm_80", 1): "any",
        ("sm_80", 2): "gpu",
        ("sm_90", 1): "hopper",
        ("sm_90", 2): "narrow",
    }


CODES = """
platform arch package-missing package-wrong package-version artifact-missing kv-dtype layout q-heads head-dim
block-size capability model parallel option probe-error broken api conflict disabled not-in-order
"""


def test_reasons_have_codes_from_a_closed_list() -> None:
    assert list(REASON_CODES) == CODES.split()
    with pytest.raises(
        ValueError, match=r"^reason code 'heads' is not known; the codes are: platform, arch, "
    ):
        Reason("heads", "It serves 8.")


def test_a_request_is_plain_frozen_data() -> None:
    request = Request("cpu", "", PRESETS["tiny"], num_heads=16, limits=Limits(512, 2, 316, 256))
    assert hash(request) == hash(Request(**vars(request)))
    with pytest.raises(AttributeError):
        request.arch = "sm_90"  # type: ignore[misc]
