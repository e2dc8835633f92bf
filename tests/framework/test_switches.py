from __future__ import annotations

from pathlib import Path

import pytest

from dsv4core.framework.switches import disabled, strict, warn_about_unknown_switches


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), ("", False), ("0", False), ("False", False), ("1", True)]
)
def test_strict(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv("DSV4_STRICT", raising=False)
    if value is not None:
        monkeypatch.setenv("DSV4_STRICT", value)
    assert strict() is expected


@pytest.mark.parametrize(("value", "names"), [("", set()), ("a", {"a"}), (" a , b,,", {"a", "b"})])
def test_disabled(monkeypatch: pytest.MonkeyPatch, value: str, names: set[str]) -> None:
    monkeypatch.setenv("DSV4_DISABLE", value)
    assert disabled() == names


def test_variables_that_nothing_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DSV4_STRIKT", "1")
    monkeypatch.setenv("DSV4_BACKEND", "acme")
    monkeypatch.setenv("DSV4_STRICT", "0")
    warn_about_unknown_switches()
    assert caplog.messages == [
        "The environment variable DSV4_BACKEND changes nothing. Options are keys of the configuration.",
        "The environment variable DSV4_STRIKT changes nothing. Did you mean DSV4_STRICT?",
    ]
