from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType

import pytest

from dsv4core.framework.wording import near_miss, one_line, warn_once, with_origin


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "ValueError: a b"
    assert one_line(ValueError("It is no.")) == "ValueError: It is no"
    assert one_line(ValueError()) == "ValueError"
    assert one_line(Unspeakable()) == "Unspeakable"


def module(folder: Path, name: str, source: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source)
    made = ModuleType(name)
    exec(compile(source, str(path), "exec"), vars(made))
    return made


def test_the_origin_is_the_last_line_of_the_package(tmp_path: Path) -> None:
    inner = module(tmp_path, "acme.inner", "def f(call):\n    call()\n")
    outer = module(tmp_path, "acme", "def f(inner, call):\n    pass\n    inner(call)\n")
    other = module(tmp_path, "acme_two", "def f():\n    raise OSError('lib')\n")
    with pytest.raises(OSError) as caught:  # noqa: PT011
        outer.f(inner.f, other.f)
    error = caught.value
    assert with_origin(error, "acme") == f"OSError: lib ({tmp_path / 'acme.inner.py'}, line 2)"
    assert with_origin(error, "acme.inner") == f"OSError: lib ({tmp_path / 'acme.inner.py'}, line 2)"
    assert with_origin(error, "acme_two") == f"OSError: lib ({tmp_path / 'acme_two.py'}, line 2)"
    assert with_origin(error, "elsewhere") == "OSError: lib"


def test_near_miss() -> None:
    assert near_miss("acne", ["acme", "other"]) == "acme"
    assert near_miss("nope", ["hopper"]) is None


def test_warnings_come_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    for text in ("100 %s", "100 %s", "other"):
        warn_once(text)
    assert [(record.name, record.levelno) for record in caplog.records] == [("dsv4core", logging.WARNING)] * 2
    assert caplog.messages == ["100 %s", "other"]
