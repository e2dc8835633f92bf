"""The file for a report: every command is run and kept, whatever the others say."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from dsv4_plugin_rocm_aiter import report
from dsv4_plugin_rocm_aiter.routes import OPERATIONS

from dsv4core.api import ConfigError
from dsv4core.cli.main import COMMANDS


def read(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        members = {own.name: archive.extractfile(own) for own in archive.getmembers()}
        return {name: file.read().decode() for name, file in members.items() if file is not None}


def test_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command that succeeds and one that fails; versions, and only variables that matter."""
    commands = {"plugins.json": ("plugins", "--json"), "run.json": ("run", "device=nothing")}
    monkeypatch.setattr(report, "COMMANDS", commands)
    monkeypatch.setenv("AITER_LOG_LEVEL", "WARNING")
    monkeypatch.setenv("HOME_OF_SECRETS", "hush")
    assert report.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "ok: dsv4 plugins --json\nexit code 2: dsv4 run device=nothing\n" in said
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("dsv4-rocm-aiter-")
    assert f"Attach {path} to a report" in said
    files = read(path)
    assert {row["name"] for row in json.loads(files["plugins.json"])} >= {"rocm_aiter", "triton"}
    assert "device=nothing is not a torch device" in files["run.json.stderr"]
    contents = json.loads(files["report.json"])
    assert [step["code"] for step in contents["steps"]] == [0, 2]
    assert {"dsv4core", "dsv4-plugin-rocm-aiter", "torch"} <= contents["packages"].keys()
    assert contents["variables"]["AITER_LOG_LEVEL"] == "WARNING"
    assert "hush" not in "".join(files.values())


def test_the_commands() -> None:
    """Those of `dsv4`, on this backend; the suite is among them, and what is left to the core exists."""
    assert {words[0] for words in report.COMMANDS.values()} <= set(COMMANDS)
    assert ("check", "rocm_aiter", "--json") in report.COMMANDS.values()
    assert all(any("rocm_aiter" in word for word in words) for words in report.COMMANDS.values())
    left = [word for words in report.COMMANDS.values() for word in words if word.startswith("backend.core=")]
    for word in left:
        assert set(word.partition("=")[2].strip("[]").split(",")) <= set(OPERATIONS)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is no folder; write one, or nothing for this one."):
        report.main([str(tmp_path / "nowhere")])
