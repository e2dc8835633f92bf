from __future__ import annotations

from pathlib import Path

import pytest

from dsv4core.api import PluginError
from dsv4core.framework.discovery import discover
from dsv4core.framework.manager import Backend, UnusableBackend, load_backend, one_line
from dsv4core.testing.fakes import FAKE_BACKEND, install_backend

TITLE = "Backend 'acme' of fake-acme 1.0"
FIX = "Repair or uninstall fake-acme; DSV4_STRICT=1 shows the traceback."
PLAN_STEP = "@hookimpl\ndef dsv4_plan_step(kind_state, step):"


def load(folder: Path, *replacements: tuple[str, str]) -> Backend:
    source = FAKE_BACKEND
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    install_backend(folder, "acme", source)
    return load_backend(discover()["acme"])


def test_good_backend(folder: Path) -> None:
    backend = load(folder)
    assert (backend.name, backend.distribution, backend.version) == ("acme", "fake-acme", "1.0")
    assert backend.info.summary == "computes nothing"
    assert backend.implements("dsv4_plan_step")
    assert not backend.implements("dsv4_describe")


def test_an_object_may_be_the_plugin(folder: Path) -> None:
    load(folder)
    install_backend(folder, "object", "import fake_acme\nclass Plugin: pass\nplugin = Plugin()\n")
    source = "".join(
        f"plugin.{name} = fake_acme.{name}\n" for name in dir(__import__("fake_acme")) if "dsv4_" in name
    )
    with (folder / "fake_object.py").open("a") as file:
        file.write(source)
    entry_points = folder / "fake_object-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text("[dsv4core.backends]\nobject = fake_object:plugin\n")
    assert load_backend(discover()["object"]).info.summary == "computes nothing"


IMPORTS = [
    ("import nowhere", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere'."),
    ("raise OSError('libcuda.so:\\n not found')", "cannot be loaded: OSError: libcuda.so: not found."),
    ("raise SystemExit(3)", "cannot be loaded: SystemExit: 3."),
    ("def f(:", "cannot be loaded: SyntaxError: invalid syntax (fake_acme.py, line 1)."),
    ("raise KeyError", "cannot be loaded: KeyError."),
]


@pytest.mark.parametrize(("source", "what"), IMPORTS)
def test_broken_import(folder: Path, source: str, what: str) -> None:
    install_backend(folder, "acme", source)
    with pytest.raises(PluginError) as caught:
        load_backend(discover()["acme"])
    assert str(caught.value) == f"[broken] {TITLE} {what} {FIX}"
    assert caught.value.__cause__ is not None


FAULTS = [
    (
        [("dsv4_plan_step", "dsv4_plan_stpe")],
        "does not follow the contract: dsv4_plan_stpe is no hook (did you mean dsv4_plan_step?); "
        "it does not implement dsv4_plan_step.",
    ),
    (
        [(PLAN_STEP, "def unrelated(kind_state, step):")],
        "does not follow the contract: it does not implement dsv4_plan_step.",
    ),
    (
        [(PLAN_STEP, PLAN_STEP.removeprefix("@hookimpl\n"))],
        "does not follow the contract: dsv4_plan_step is not marked with @hookimpl.",
    ),
    (
        [(PLAN_STEP, PLAN_STEP.replace("step)", "stp)"))],
        "does not follow the contract: dsv4_plan_step takes stp, but its arguments are kind_state, step.",
    ),
    (
        [(PLAN_STEP, PLAN_STEP.replace("step)", "step=None)"))],
        "does not follow the contract: dsv4_plan_step takes step as an optional argument, "
        "and so would never get it.",
    ),
    (
        [(PLAN_STEP, PLAN_STEP.replace("step)", "**rest)"))],
        "does not follow the contract: dsv4_plan_step takes **rest, but its arguments are kind_state, step.",
    ),
    (
        [("return BackendInfo(", "return dict(")],
        "returned dict from dsv4_backend_info, where BackendInfo is due.",
    ),
    (
        [("class Options(BackendOptions)", "class Options")],
        "has options of <class 'fake_acme.Options'>, which is no subclass of BackendOptions.",
    ),
    (
        [("@dataclass\nclass Options", "class Options")],
        "has options of Options, which is not decorated with @dataclass.",
    ),
    (
        [
            (
                "workspace_mib: int = 64",
                "workspace_mib: int = 64\n    def __post_init__(self): raise ValueError('no')",
            )
        ],
        "cannot be loaded: ValueError: no.",
    ),
    (
        [("capabilities=frozenset()", "capabilities=frozenset(), colour='red'")],
        "cannot be loaded: TypeError: BackendInfo.__init__() got an unexpected keyword argument 'colour'.",
    ),
]


@pytest.mark.parametrize(("replacements", "what"), FAULTS)
def test_breach_of_the_contract(folder: Path, replacements: list[tuple[str, str]], what: str) -> None:
    with pytest.raises(UnusableBackend) as caught:
        load(folder, *replacements)
    assert str(caught.value) == f"[broken] {TITLE} {what} {FIX}"


def test_a_wrapper_does_not_count_as_an_implementation(folder: Path) -> None:
    with pytest.raises(UnusableBackend, match="it does not implement dsv4_plan_step"):
        load(folder, (PLAN_STEP, PLAN_STEP.replace("hookimpl", "hookimpl(wrapper=True)")))


def test_wrong_api_is_found_before_its_hooks_are_judged(folder: Path) -> None:
    with pytest.raises(UnusableBackend) as caught:
        load(folder, ("api=API_VERSION", "api=7"), ("dsv4_plan_step", "dsv4_old_hook"))
    assert str(caught.value) == (
        f"[api] {TITLE} was written for version 7 of the contract, and this dsv4core serves 0. "
        "Install versions of dsv4core and fake-acme that fit each other."
    )


def test_a_record_with_a_problem_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_DISABLE", "acme")
    with pytest.raises(UnusableBackend) as caught:
        load(folder)
    assert caught.value.reason.code == "disabled"


def test_strict_lets_the_original_through(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_backend(folder, "acme", "raise OSError('lib')")
    monkeypatch.setenv("DSV4_STRICT", "1")
    with pytest.raises(OSError, match=r"^lib$"):
        load_backend(discover()["acme"])


def test_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "ValueError: a b"
    assert one_line(ValueError()) == "ValueError"
