"""What the tests of commands ask of a terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsv4core.cli.main import main

Capture = pytest.CaptureFixture[str]


def explain(capsys: Capture, *words: str, code: int = 0) -> dict[str, Any]:
    """What `dsv4 explain --json` reports of a CPU."""
    assert main(["explain", "device=cpu", "--json", *words]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def error(capsys: Capture, *words: str) -> str:
    """The one line that a command ends with."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dsv4: ")
    assert captured.err.endswith(".\n")
    return captured.err.removeprefix("dsv4: ").removesuffix("\n")
