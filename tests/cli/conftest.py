from __future__ import annotations

from pathlib import Path

import pytest

from dsv4core.testing.fakes import isolate


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The backends installed here are the only ones; it is also the current folder."""
    isolate(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path
