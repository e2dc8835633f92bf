from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsv4core import __version__
from dsv4core.api import PluginError
from dsv4core.framework.discovery import discover
from dsv4core.framework.manager import Backend, load_backend
from dsv4core.testing.fakes import altered, install_backend

TITLE = "Backend 'acme' of fake-acme 1.0"
REPAIR = "Repair or uninstall fake-acme."
TRACE = "Repair or uninstall fake-acme; DSV4_STRICT=1 shows the traceback."
PLAN_STEP = "@hookimpl\ndef dsv4_plan_step(kind_state, step):"


def load(folder: Path, *replacements: tuple[str, str]) -> Backend:
    install_backend(folder, "acme", altered(*replacements))
    return load_backend(discover()["acme"])


def test_good_backend(folder: Path) -> None:
    backend = load(folder)
    assert (backend.name, backend.record.source) == ("acme", "fake-acme 1.0")
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
    ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'{origin}."),
    ("raise OSError('libcuda.so:\\n not found')", "OSError: libcuda.so: not found{origin}."),
    ("raise SystemExit(3)", "SystemExit: 3{origin}."),
    ("raise KeyError", "KeyError{origin}."),
    ("def f(:", "SyntaxError: invalid syntax (fake_acme.py, line 1)."),
    ("class E(Exception): __str__ = None\nraise E", "E ({module}, line 2)."),
]


@pytest.mark.parametrize(("source", "what"), IMPORTS)
def test_broken_import(folder: Path, source: str, what: str) -> None:
    install_backend(folder, "acme", source)
    with pytest.raises(PluginError) as caught:
        load_backend(discover()["acme"])
    module = folder / "fake_acme.py"
    text = what.format(module=module, origin=f" ({module}, line 1)")
    assert str(caught.value) == f"[broken] {TITLE} cannot be loaded: {text} {TRACE}"
    assert caught.value.__cause__ is not None


def test_the_origin_is_the_plugins_own_line(folder: Path) -> None:
    install_backend(folder, "acme", "import json\n\njson.loads('{')")
    with pytest.raises(PluginError, match=r"JSONDecodeError: .* \(.*fake_acme\.py, line 3\)\. Repair"):
        load_backend(discover()["acme"])


def test_what_is_no_exception_is_isolated_too(folder: Path) -> None:
    install_backend(folder, "acme", "class Panic(BaseException): pass\nraise Panic('in Rust')")
    with pytest.raises(PluginError, match=r"cannot be loaded: Panic: in Rust \("):
        load_backend(discover()["acme"])


def test_an_exit_is_never_let_through(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_STRICT", "1")
    install_backend(folder, "acme", "raise SystemExit(0)")
    with pytest.raises(PluginError, match="cannot be loaded: SystemExit: 0 ") as caught:
        load_backend(discover()["acme"])
    assert isinstance(caught.value.__cause__, SystemExit)


def test_a_class_is_no_backend(folder: Path) -> None:
    install_backend(folder, "acme", "class Plugin: pass")
    entry_points = folder / "fake_acme-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text("[dsv4core.backends]\nacme = fake_acme:Plugin\n")
    with pytest.raises(PluginError) as caught:
        load_backend(discover()["acme"])
    assert str(caught.value) == (
        f"[broken] {TITLE} is the class Plugin; let its entry point name an instance or a module. {REPAIR}"
    )


def test_info_may_have_another_function_name(folder: Path) -> None:
    renamed = ("@hookimpl\ndef dsv4_backend_info", "@hookimpl(specname='dsv4_backend_info')\ndef about")
    assert load(folder, renamed).info.summary == "computes nothing"


def test_an_interrupt_is_not_a_fault(folder: Path) -> None:
    install_backend(folder, "acme", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_backend(discover()["acme"])


ATTEND = "@hookimpl\ndef dsv4_forward_mqa"
PARTIAL = "from functools import partial\ndsv4_plan_step = partial(dsv4_plan_step)\n"
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
        [(ATTEND, PARTIAL + ATTEND)],
        "does not follow the contract: dsv4_plan_step is no plain function.",
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
        [("int = 64", "int = 64\n    def __post_init__(self): self.name = 'other'")],
        "has options that change their name to 'other'.",
    ),
    (
        [("@dataclass\nclass Options", "class Options")],
        "has options of Options, which is not decorated with @dataclass.",
    ),
]


@pytest.mark.parametrize(("replacements", "what"), FAULTS)
def test_breach_of_the_contract(folder: Path, replacements: list[tuple[str, str]], what: str) -> None:
    with pytest.raises(PluginError) as caught:
        load(folder, *replacements)
    assert str(caught.value) == f"[broken] {TITLE} {what} {REPAIR}"


def test_a_wrapper_does_not_count_as_an_implementation(folder: Path) -> None:
    with pytest.raises(PluginError, match="it does not implement dsv4_plan_step"):
        load(folder, (PLAN_STEP, PLAN_STEP.replace("hookimpl", "hookimpl(wrapper=True)")))


RAISING = [
    (
        ("int = 64", "int = 64\n    def __post_init__(self): raise ValueError('no')"),
        "cannot be loaded: ValueError: no ({module}, line 19).",
    ),
    (
        ("capabilities=frozenset()", "capabilities=frozenset(), colour='red'"),
        "cannot be loaded: TypeError: BackendInfo.__init__() got an unexpected keyword argument 'colour' "
        "({module}, line 23).",
    ),
    (
        ("capabilities=frozenset()", "capabilities=frozenset({'fast'})"),
        "cannot be loaded: ValueError: capabilities ['fast'] are not known; the list is closed: defer-sink, "
        "deterministic, graph, kernel-seam, lse, multi-token-decode, needs-host-lengths, private-output, "
        "strided-pages, tensor-parallel ({module}, line 23).",
    ),
    (
        ("capabilities=frozenset()", "capabilities=['graph']"),
        "cannot be loaded: ValueError: capabilities=['graph'] cannot be; give a tuple or a frozenset "
        "({module}, line 23).",
    ),
    (
        ('platforms=("cpu",)', 'platforms="cpu"'),
        "cannot be loaded: ValueError: platforms='cpu' cannot be; give a tuple or a frozenset "
        "({module}, line 23).",
    ),
    (
        ('platforms=("cpu",)', 'platforms=("cpu", "a chip")'),
        "cannot be loaded: ValueError: platforms=('cpu', 'a chip') cannot be; name those that it has kernels "
        "for ({module}, line 23).",
    ),
    (
        ('summary="computes nothing"', "summary=None"),
        "cannot be loaded: ValueError: summary=None cannot be; give one line for tables ({module}, line 23).",
    ),
    (
        ("capabilities=frozenset()", "requirements=('torch',)"),
        "cannot be loaded: ValueError: requirements=('torch',) cannot be; give several Requirement "
        "({module}, line 23).",
    ),
    (
        ('platforms=("cpu",)', "platforms=()"),
        "cannot be loaded: ValueError: platforms=() cannot be; name those that it has kernels for "
        "({module}, line 23).",
    ),
]


@pytest.mark.parametrize(("replacement", "what"), RAISING)
def test_a_description_that_raises(folder: Path, replacement: tuple[str, str], what: str) -> None:
    with pytest.raises(PluginError) as caught:
        load(folder, replacement)
    text = re.sub(r", line \d+\)", ", line N)", str(caught.value))
    expected = re.sub(r", line \d+\)", ", line N)", what.format(module=folder / "fake_acme.py"))
    assert text == f"[broken] {TITLE} {expected} {TRACE}"


def test_wrong_api_is_found_before_its_hooks_are_judged(folder: Path) -> None:
    with pytest.raises(PluginError) as caught:
        load(folder, ("api=API_VERSION", "api=7"), ("dsv4_plan_step", "dsv4_old_hook"))
    assert str(caught.value) == (
        f"[api] {TITLE} was written for version 7 of the contract, and dsv4core {__version__} serves 0. "
        "Install a version of fake-acme that fits, or another version of dsv4core."
    )


def test_wrong_api_says_which_cores_would_fit(folder: Path) -> None:
    install_backend(folder, "acme", altered(("api=API_VERSION", "api=7")), requires="dsv4core>=0.0.1")
    with pytest.raises(PluginError) as caught:
        load_backend(discover()["acme"])
    assert caught.value.reason.fix == (
        "Install a version of fake-acme that fits, or `pip install 'dsv4core>=0.0.1'`."
    )


def test_another_core_is_asked_for_before_anything_is_imported(folder: Path) -> None:
    install_backend(folder, "acme", "raise OSError('imported')", requires="dsv4core<10,>=9")
    with pytest.raises(PluginError) as caught:
        load_backend(discover()["acme"])
    assert str(caught.value) == (
        f"[api] {TITLE} needs dsv4core<10,>=9, and this is dsv4core {__version__}. "
        "Install a version of fake-acme that fits, or `pip install 'dsv4core<10,>=9'`."
    )


def test_the_core_that_is_asked_for(folder: Path) -> None:
    install_backend(folder, "acme", requires=f"dsv4core=={__version__}")
    assert load_backend(discover()["acme"]).name == "acme"


def test_a_record_with_a_problem_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_DISABLE", "acme")
    with pytest.raises(PluginError) as caught:
        load(folder)
    assert caught.value.reason.code == "disabled"


def test_strict_lets_the_original_through(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_backend(folder, "acme", "raise OSError('lib')")
    monkeypatch.setenv("DSV4_STRICT", "1")
    with pytest.raises(OSError, match="lib") as caught:
        load_backend(discover()["acme"])
    assert caught.value.args == ("lib",)
