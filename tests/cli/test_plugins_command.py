from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4core.cli.main import main
from dsv4core.testing.fakes import altered, install_backend

IMPORT = ("hookimpl,\n", "hookimpl, Requirement,\n")
NEEDS = "requirements=(Requirement('flashfoo', 'flashfoo', 'pip install flashfoo', '>=2'),),"


@pytest.fixture(autouse=True)
def backends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install_backend(folder, "acme")
    install_backend(folder, "broken", "raise OSError('lib')")
    install_backend(folder, "flashmla", altered(("api=API_VERSION", "api=9")))
    install_backend(folder, "needy", altered(("capabilities=", NEEDS + "capabilities="), IMPORT))
    install_backend(folder, "off")
    install_backend(folder, "twice", distribution="fake-one")
    install_backend(folder, "twice", distribution="fake-two")
    monkeypatch.setenv("DSV4_DISABLE", "off")
    return folder


def test_json(backends: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    by_name = {row["name"]: row for row in rows}
    assert [(row["name"], row["status"], row["dist"], row["version"]) for row in rows] == [
        ("acme", "ok", "fake-acme", "1.0"),
        ("broken", "broken", "fake-broken", "1.0"),
        ("flashmla", "api", "fake-flashmla", "1.0"),
        ("needy", "package-missing", "fake-needy", "1.0"),
        ("off", "disabled", "fake-off", "1.0"),
        ("twice", "conflict", by_name["twice"]["dist"], "1.0"),
        ("flashinfer", "absent", "dsv4-plugin-flashinfer", None),
        ("rocm_aiter", "absent", "dsv4-plugin-rocm-aiter", None),
        ("hopper", "absent", "dsv4-plugin-hopper", None),
    ]
    assert by_name["acme"]["summary"] == "computes nothing"
    assert by_name["acme"]["fix"] is None
    assert by_name["broken"]["summary"] == (
        "Backend 'broken' of fake-broken 1.0 cannot be loaded: OSError: lib "
        f"({backends / 'fake_broken.py'}, line 1)."
    )
    assert by_name["twice"]["summary"] == (
        f"Backend 'twice' is declared more than once: by fake-one 1.0 (as fake_one in {backends}) and "
        f"fake-two 1.0 (as fake_two in {backends})."
    )
    assert (by_name["needy"]["summary"], by_name["needy"]["fix"]) == (
        "It needs flashfoo>=2, which is not installed.",
        "Run `pip install flashfoo`.",
    )
    assert by_name["hopper"]["fix"] == "pip install dsv4-plugin-hopper"
    assert list(rows[0]) == ["name", "status", "dist", "version", "summary", "fix"]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    text = capsys.readouterr().out
    assert "pip install dsv4-plugin-flashinfer" in text
    assert text.splitlines()[0].split() == ["name", "status", "about"]
    assert text.splitlines()[1].split() == ["acme", "ok", "computes", "nothing"]
    assert text.splitlines()[2].split() == ["fake-acme", "1.0"]


def test_strict_raises_what_is_wrong_before_an_import(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSV4_STRICT", "1")
    assert main(["plugins"]) == 2
    assert capsys.readouterr().err.startswith("dsv4: [conflict] Backend 'twice' is declared more than once")


def test_strict_shows_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_STRICT", "1")
    monkeypatch.setenv("DSV4_DISABLE", "off,twice")
    with pytest.raises(OSError, match="lib"):
        main(["plugins"])
