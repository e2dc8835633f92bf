from __future__ import annotations

import time
from pathlib import Path

import pytest

from dsv4core.api import Request
from dsv4core.framework import watchdog
from dsv4core.framework.discovery import discover
from dsv4core.framework.manager import load_backend
from dsv4core.framework.selection import select
from dsv4core.testing.fakes import FAKE_BACKEND, altered, install_backend

SLOW_IMPORT = "import time; time.sleep(0.5)\n" + FAKE_BACKEND
SLOW_PROBE = altered(("    return []\n", "    import time; time.sleep(0.5)\n    return []\n"))
ADVICE = "has taken 0.1 s so far. If it hangs, interrupt it and start again with DSV4_DISABLE=acme.\n"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE", 0.1)


def test_patience_is_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert watchdog.PATIENCE == 5


def test_a_slow_import_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_backend(folder, "acme", SLOW_IMPORT)
    assert load_backend(discover()["acme"]).name == "acme"
    assert capsys.readouterr().err == f"dsv4: Importing backend 'acme' of fake-acme 1.0 {ADVICE}"


def test_a_slow_probe_is_named(folder: Path, request_: Request, capsys: pytest.CaptureFixture[str]) -> None:
    install_backend(folder, "acme", SLOW_PROBE)
    assert select(request_, "acme").backend.name == "acme"
    text = f"dsv4: Asking backend 'acme' of fake-acme 1.0 what it can run {ADVICE}"
    assert capsys.readouterr().err == text


def test_quick_ones_are_not(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE", 2.0)  # a busy machine takes 0.1 s for a quick one
    install_backend(folder, "acme")
    install_backend(folder, "broken", "raise OSError")
    load_backend(discover()["acme"])
    with pytest.raises(Exception, match="OSError"):
        load_backend(discover()["broken"])
    time.sleep(2.2)
    assert capsys.readouterr().err == ""
