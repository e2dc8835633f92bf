from __future__ import annotations

from pathlib import Path

import pytest

from dsv4core.api import Limits, Request
from dsv4core.model.shapes import PRESETS
from dsv4core.testing.fakes import isolate


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The backends installed here are the only ones."""
    isolate(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def request_() -> Request:
    return Request("cpu", "", PRESETS["tiny"], num_heads=16, limits=Limits(512, 2, 316, 256))
