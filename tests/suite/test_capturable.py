"""What only backends that can be captured have to show, on one that can; `tests/gpu` has it on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4core.testing.fakes import declare_backends, isolate
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite.test_hot import *  # noqa: F403
from tests.suite.capturable import Capturable

capturable = Capturable()
BACKENDS = {
    "capturable": "tests.suite.test_capturable:capturable",
    "reference": "dsv4core.backends.reference",
}


@pytest.fixture
def dsv4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    declare_backends(tmp_path, "capturable", BACKENDS)
    isolate(tmp_path, monkeypatch)
    return Subject("capturable")
