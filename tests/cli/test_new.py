"""`dsv4 new` refuses what would not work, and writes nothing of the template's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4core.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_written(here: Path, capsys: Capture) -> None:
    assert main(["new", "wave_npu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["backend"], found["folder"]) == ("wave_npu", "dsv4-plugin-wave-npu")
    assert "dsv4_plugin_wave_npu/plugin.py" in found["files"]
    folder = here / found["folder"]
    assert sorted(found["files"]) == sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )
    for path in folder.rglob("*"):
        assert "acme" not in path.name
        assert path.is_dir() or "acme" not in path.read_text()


def test_a_name_that_holds_the_templates(here: Path) -> None:
    assert main(["new", "acme_npu"]) == 0
    project = (here / "dsv4-plugin-acme-npu" / "pyproject.toml").read_text()
    assert 'name = "dsv4-plugin-acme-npu"' in project
    assert 'acme_npu = "dsv4_plugin_acme_npu.plugin"' in project


def test_what_to_do_next(capsys: Capture) -> None:
    assert main(["new", "wave"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "dsv4-plugin-wave: 8 files. What to do next:",
        "",
        "  cd dsv4-plugin-wave",
        '  pip install -e ".[test]"',
        "  dsv4 plugins",
        "  dsv4 check wave",
    ]


def test_nothing_is_overwritten(here: Path, capsys: Capture) -> None:
    (here / "dsv4-plugin-wave").mkdir()
    assert main(["new", "wave"]) == 2
    assert capsys.readouterr().err == (
        "dsv4: dsv4-plugin-wave is there already; remove it, or work in another folder.\n"
    )


MISTAKES = [
    ([], "dsv4 new takes one name, and was given none; write dsv4 new NAME."),
    (["a", "b"], "dsv4 new takes one name, and was given a b; write dsv4 new NAME."),
    (["Wave"], "'Wave' is no name for a backend; use small letters, digits and _, as in acme_npu."),
    (["wave-npu"], "'wave-npu' is no name for a backend; use small letters, digits and _, as in acme_npu."),
    (["auto"], "A backend named 'auto' is there already; choose another name."),
    (["reference"], "A backend named 'reference' is there already; choose another name."),
    (["flashmla"], "A backend named 'flashmla' is there already; choose another name."),
]


@pytest.mark.parametrize(("words", "text"), MISTAKES)
def test_mistakes(here: Path, capsys: Capture, words: list[str], text: str) -> None:
    assert main(["new", *words]) == 2
    assert capsys.readouterr().err == f"dsv4: {text}\n"
    assert not list(here.iterdir())
