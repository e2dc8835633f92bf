"""Options of backends on the command line: typed, checked, nested, and never those of another backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4core.api import ConfigError, DSV4Error, PluginError
from dsv4core.hydra import compose
from dsv4core.testing.fakes import altered, install_backend


def message(*overrides: str, kind: type[DSV4Error] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        compose(overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_options_are_the_backends_own(folder: Path) -> None:
    install_backend(folder, "acme")
    options = compose(["backend=acme", "backend.workspace_mib=3"]).backend
    assert type(options).__module__ == "fake_acme"
    assert vars(options) == {"name": "acme", "workspace_mib": 3}


def test_options_of_a_backend_are_checked(folder: Path) -> None:
    check = "workspace_mib: int = 64\n\n    def __post_init__(self):\n        if self.workspace_mib < 1:\n"
    check += "            raise ValueError('workspace_mib must be at least 1.')"
    install_backend(folder, "acme", altered(("workspace_mib: int = 64", check)))
    assert message("backend=acme", "backend.workspace_mib=x") == (
        "backend.workspace_mib takes int: Value 'x' of type 'str' could not be converted to Integer."
    )
    assert message("backend=acme", "backend.zzz=1") == (
        "'backend.zzz' is not an option of this backend; it takes backend.workspace_mib."
    )
    assert message("backend=acme", "backend.workspace_mib=0") == (
        "backend=acme refuses its options: workspace_mib must be at least 1."
    )


NESTED = """
@dataclass
class Tuning:
    split: int = 1


@dataclass
class Options(BackendOptions):
    tuning: Tuning = field(default_factory=Tuning)
"""


@pytest.mark.parametrize("raised", ["KeyError('x')", "TypeError('x')", "AssertionError('x')"])
def test_options_that_raise_anything(folder: Path, raised: str) -> None:
    check = f"int = 64\n    def __post_init__(self):\n        if self.workspace_mib < 0: raise {raised}"
    install_backend(folder, "acme", altered(("int = 64", check)))
    text = message("backend=acme", "backend.workspace_mib=-1")
    assert "backend" in text
    assert "x" in text


def test_choices_of_a_backend(folder: Path) -> None:
    choices = "int = field(default=64, metadata={'choices': (64, 128)})"
    install_backend(
        folder, "acme", altered(("int = 64", choices), ("import dataclass", "import dataclass, field"))
    )
    assert vars(compose(["backend=acme", "backend.workspace_mib=128"]).backend)["workspace_mib"] == 128
    assert message("backend=acme", "backend.workspace_mib=3") == (
        "backend.workspace_mib=3 is not known; use 64 or 128."
    )


def test_options_with_types_that_nobody_knows(folder: Path) -> None:
    source = "from __future__ import annotations\n" + altered(("workspace_mib: int", "workspace_mib: Nope"))
    install_backend(folder, "acme", source)
    text = message("backend=acme", kind=PluginError)
    assert text.startswith(
        "[broken] Backend 'acme' of fake-acme 1.0 has options that Hydra cannot hold: NameError: name 'Nope'"
    )


def test_options_may_be_lists_and_mappings(folder: Path) -> None:
    kinds = "workspace_mib: int = 64\n    sizes: list[float] = field(default_factory=list)\n"
    kinds += "    limits: dict[str, int] = field(default_factory=dict)\n"
    kinds += "    names: list[str] = field(default_factory=list)"
    install_backend(
        folder,
        "acme",
        altered(("workspace_mib: int = 64", kinds), ("import dataclass", "import dataclass, field")),
    )
    words = ["backend.sizes=[1.5,2]", "backend.limits.a=3", "backend.names=[a,90]"]
    options = vars(compose(["backend=acme", *words]).backend)
    assert (options["sizes"], options["limits"], options["names"]) == ([1.5, 2.0], {"a": 3}, ["a", "90"])
    assert message("backend=acme", "backend.names=a") == (
        "backend.names=a is no list of names; write 'backend.names=[a,b]'."
    )
    assert message("backend=acme", "backend.limits=3") == (
        "backend.limits=3 has no keys; set one of them, as in 'backend.limits.KEY=VALUE'."
    )


def test_nested_options(folder: Path) -> None:
    plain = "@dataclass\nclass Options(BackendOptions):\n    workspace_mib: int = 64\n"
    install_backend(folder, "acme", altered((plain, NESTED), ("import dataclass", "import dataclass, field")))
    options = compose(["backend=acme", "backend.tuning.split=4"]).backend
    assert options.tuning.split == 4  # type: ignore[attr-defined]
    for typo in ("backend.tuning.splt=4", "+backend.tuning.splt=4"):
        assert message("backend=acme", typo) == (
            "'backend.tuning.splt' is not an option of this backend; it takes backend.tuning.split."
        )


def test_a_name_with_a_dot(folder: Path) -> None:
    install_backend(folder, "acme.fast", distribution="fake-a")
    install_backend(folder, "acme.exact", altered(("= 64", "= 7")), distribution="fake-b")
    assert vars(compose(["backend=acme.fast"]).backend) == {"name": "acme.fast", "workspace_mib": 64}
    assert vars(compose(["backend=acme.exact"]).backend) == {"name": "acme.exact", "workspace_mib": 7}


def test_options_that_hydra_cannot_hold(folder: Path) -> None:
    install_backend(folder, "acme", altered(("workspace_mib: int = 64", "workspace_mib: complex = 1j")))
    text = message("backend=acme", kind=PluginError)
    assert text.startswith("[broken] Backend 'acme' of fake-acme 1.0 has options that Hydra cannot hold: ")
