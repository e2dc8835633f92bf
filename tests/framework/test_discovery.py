from __future__ import annotations

from pathlib import Path

import pytest

from dsv4core.framework.discovery import BackendRecord, absent_reason, discover
from dsv4core.testing.fakes import install_backend

BOOM = "raise RuntimeError('imported')"


def declare(folder: Path, directory: str, metadata: str | None, entry_points: str) -> None:
    (folder / directory).mkdir()
    (folder / directory / "entry_points.txt").write_text(entry_points)
    if metadata is not None:
        name = "PKG-INFO" if directory.endswith("egg-info") else "METADATA"
        (folder / directory / name).write_text(metadata)


def test_records_are_found_without_importing_anything(folder: Path) -> None:
    install_backend(folder, "zeta", BOOM)
    install_backend(folder, "alpha", BOOM, distribution="fake-a", version="2.1")
    assert discover() == {
        "alpha": BackendRecord("alpha", "fake_a", "fake-a", "2.1"),
        "zeta": BackendRecord("zeta", "fake_zeta", "fake-zeta", "1.0"),
    }
    assert list(discover()) == ["alpha", "zeta"]


def test_other_groups_and_damaged_metadata_of_others_do_not_matter(folder: Path) -> None:
    declare(folder, "other-1.dist-info", None, "[console_scripts]\nx = y:z\n")
    declare(folder, "odd-1.dist-info", None, "not an ini file")
    assert discover() == {}


def test_a_damaged_distribution_is_still_listed(folder: Path) -> None:
    declare(folder, "acme-1.dist-info", None, "[dsv4core.backends]\nacme = acme\n")
    assert discover()["acme"] == BackendRecord("acme", "acme", "a distribution without METADATA", "")


def test_stale_egg_info_with_the_same_target_is_the_same_backend(folder: Path) -> None:
    install_backend(folder, "acme", BOOM, distribution="fake-acme")
    entry_points = "[dsv4core.backends]\nacme = fake_acme\n"
    declare(folder, "fake_acme.egg-info", "Name: Fake_Acme\nVersion: 0.1\n", entry_points)
    record = discover()["acme"]
    assert record.value == "fake_acme"
    assert record.problem is None


def test_two_distributions_with_one_name_are_a_conflict(folder: Path) -> None:
    install_backend(folder, "acme", BOOM, distribution="fake-one")
    install_backend(folder, "acme", BOOM, distribution="fake-two", version="2.0")
    problem = discover()["acme"].problem
    assert str(problem) == (
        "[conflict] Backend 'acme' is declared more than once: fake-one 1.0 (fake_one) and "
        "fake-two 2.0 (fake_two). Uninstall all but one."
    )


def test_one_distribution_with_two_targets_is_a_conflict(folder: Path) -> None:
    install_backend(folder, "acme", BOOM, distribution="fake-acme")
    entry_points = "[dsv4core.backends]\nacme = elsewhere\n"
    declare(folder, "fake_acme.egg-info", "Name: fake-acme\nVersion: 0.9\n", entry_points)
    problem = discover()["acme"].problem
    assert problem is not None
    assert problem.text == (
        "Backend 'acme' is declared more than once: fake-acme 0.9 (elsewhere) and fake-acme 1.0 (fake_acme)."
    )


@pytest.mark.parametrize("name", ["auto", "not-a-name"])
def test_names_that_cannot_be_used(folder: Path, name: str) -> None:
    install_backend(folder, name, BOOM, distribution="fake-acme")
    assert str(discover()[name].problem) == (
        f"[broken] fake-acme declares a backend named {name!r}, which is not a usable name. "
        "Use an identifier other than 'auto'."
    )


def test_disable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("acme", "other", "third"):
        install_backend(folder, name, BOOM)
    monkeypatch.setenv("DSV4_DISABLE", "acme, other")
    assert [record.problem is None for record in discover().values()] == [False, False, True]
    expected = "[disabled] Backend 'acme' is disabled. Take its name out of DSV4_DISABLE."
    assert str(discover()["acme"].problem) == expected


def test_absent_reason() -> None:
    assert str(absent_reason("flashmla", [])) == (
        "[package-missing] Backend 'flashmla' is not installed. Run `pip install dsv4-plugin-flashmla`."
    )
    assert str(absent_reason("flashmal", [])) == (
        "[package-missing] No backend is named 'flashmal'. Did you mean 'flashmla'?"
    )
    assert str(absent_reason("acne", ["acme"])) == (
        "[package-missing] No backend is named 'acne'. Did you mean 'acme'?"
    )
    assert str(absent_reason("x", ["acme"])) == (
        "[package-missing] No backend is named 'x'. "
        "The names are: acme, auto, flashinfer, flashmla, hopper, rocm_aiter."
    )
