"""Calls into a kernel library that moved are found in a backend's source, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4core.api import DSV4Error
from dsv4core.testing import signatures
from dsv4core.testing.fakes import FAKE_BACKEND, altered, declare_backends, isolate
from dsv4core.testing.subject import Elsewhere, Subject
from dsv4core.testing.suite.test_calls import (
    test_calls_fit_the_installed_library as installed_check,
)
from dsv4core.testing.suite.test_calls import (
    test_calls_fit_the_recorded_signatures as recorded_check,
)

LIBRARY = "def attend(q, cache, /, block_table, scale=1.0, *, lens=None, **rest): ...\ndef plan(a): ...\n"
KERNELS = """\
import fast_kernels
from fast_kernels import attend


def run(q, cache, table, options):
    attend(q, cache, table, lens=3)
    fast_kernels.attend(q, cache, block_table=table, scale=2.0, **options)
"""
REQUIREMENT = (
    "capabilities=frozenset(),",
    'capabilities=frozenset(), requirements=(Requirement("fast_kernels", "fast-kernels", "pip"),),',
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A backend in a package, with kernels that call a library."""
    folder = tmp_path / "fast_backend"
    folder.mkdir()
    source = altered(
        REQUIREMENT, ("    hookimpl,\n", "    Requirement,\n    hookimpl,\n"), source=FAKE_BACKEND
    )
    (folder / "__init__.py").write_text("")
    (folder / "plugin.py").write_text(source)
    (folder / "kernels.py").write_text(KERNELS)
    (tmp_path / "fast_kernels.py").write_text(LIBRARY)
    declare_backends(tmp_path, "fast", {"fast": "fast_backend.plugin"})
    isolate(tmp_path, monkeypatch)
    for name in ("fast_kernels", "fast_backend", "fast_backend.plugin"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    return folder


def test_what_is_recorded(package: Path) -> None:
    signatures.main(["fast_backend", "fast_kernels.attend"])
    (entry,) = json.loads((package / "signatures.json").read_text())
    assert entry["target"] == "fast_kernels.attend"
    assert entry["signature"] == "(q, cache, /, block_table, scale=..., *, lens=..., **rest)"
    (recorded,) = signatures.read(package)
    assert [own.kind.name for own in recorded.parsed.parameters.values()] == [
        "POSITIONAL_ONLY",
        "POSITIONAL_ONLY",
        "POSITIONAL_OR_KEYWORD",
        "POSITIONAL_OR_KEYWORD",
        "KEYWORD_ONLY",
        "VAR_KEYWORD",
    ]
    recorded_check(Subject("fast"))
    installed_check(Subject("fast"))


def test_a_library_that_is_not_recorded(package: Path) -> None:
    with pytest.raises(
        AssertionError, match="It needs fast_kernels, and signatures.json in its package records"
    ):
        recorded_check(Subject("fast"))


MOVED = [
    ("def attend(q, cache, block_table, scale=1.0): ...", "kernels.py:6: got an unexpected keyword .*'lens'"),
    (
        "def attend(q, cache, table, lens=None, **rest): ...",
        "kernels.py:7: missing a required argument: 'table'",
    ),
]


@pytest.mark.parametrize(("library", "text"), MOVED[:1])
def test_a_keyword_that_moved(package: Path, library: str, text: str) -> None:
    (package.parent / "fast_kernels.py").write_text(library)
    signatures.main(["fast_backend", "fast_kernels.attend"])
    for check in (recorded_check, installed_check):
        with pytest.raises(AssertionError, match=text):
            check(Subject("fast"))


def test_a_recorded_function_that_nobody_calls(package: Path) -> None:
    signatures.main(["fast_backend", "fast_kernels.attend", "fast_kernels.plan"])
    with pytest.raises(AssertionError, match=r"fast_kernels.plan is recorded, and nothing calls it"):
        recorded_check(Subject("fast"))


def test_a_library_whose_calls_cannot_be_followed(package: Path) -> None:
    (package / "kernels.py").write_text("import fast_kernels\n\nrun = fast_kernels.kernel[1]\n")
    signatures.main(["fast_backend", "fast_kernels"])
    recorded_check(Subject("fast"))
    installed_check(Subject("fast"))


def test_functions_of_the_same_name_elsewhere(package: Path) -> None:
    """Only files that import the library can call it."""
    (package / "other.py").write_text("def attend(): ...\n\n\nattend()\n")
    signatures.main(["fast_backend", "fast_kernels.attend"])
    recorded_check(Subject("fast"))


def test_a_library_that_is_not_installed(package: Path) -> None:
    signatures.main(["fast_backend", "fast_kernels.attend"])
    text = (package / "signatures.json").read_text().replace("fast_kernels", "absent_kernels")
    (package / "signatures.json").write_text(text)
    with pytest.raises(Elsewhere, match=r"absent_kernels is not installed here\."):
        installed_check(Subject("fast"))


MISTAKES = [
    ([], "Write: python -m dsv4core.testing.signatures PACKAGE MODULE.FUNCTION …"),
    (["zzz", "a.b"], "No package is named 'zzz'; name the backend's import package."),
    (["fast_kernels", "a.b"], "fast_kernels is a single module; signatures are kept in a package's folder."),
    (
        ["fast_backend", "fast_kernels.zzz"],
        "fast_kernels.zzz cannot be recorded: module 'fast_kernels' has no ",
    ),
]


@pytest.mark.parametrize(("words", "text"), MISTAKES)
def test_mistakes(package: Path, words: list[str], text: str) -> None:
    with pytest.raises(DSV4Error) as error:
        signatures.main(words)
    assert str(error.value).startswith(text)
