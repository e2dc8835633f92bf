from __future__ import annotations

from pathlib import Path

import pytest

from dsv4core.api import PluginError, Reason
from dsv4core.framework.discovery import BackendRecord, discover
from dsv4core.framework.known import absent_reason
from dsv4core.testing.fakes import install_backend

BOOM = "raise RuntimeError('imported')"


def declare(folder: Path, directory: str, metadata: str | None, entry_points: str | bytes) -> None:
    (folder / directory).mkdir(parents=True)
    content = entry_points if isinstance(entry_points, bytes) else entry_points.encode()
    (folder / directory / "entry_points.txt").write_bytes(content)
    if metadata is not None:
        name = "PKG-INFO" if directory.endswith("egg-info") else "METADATA"
        (folder / directory / name).write_text(metadata)


def problem(name: str, *disable: str) -> Reason:
    found = discover(disable)[name].problem
    assert found is not None
    return found


def test_records_are_found_without_importing_anything(folder: Path) -> None:
    install_backend(folder, "zeta", BOOM, requires="dsv4core<0.2,>=0.1")
    install_backend(folder, "alpha", BOOM, distribution="fake-a", version="2.1", requires="dsv4core-extra<3")
    assert discover() == {
        "alpha": BackendRecord("alpha", "fake_a", "fake-a", "2.1", "", str(folder)),
        "zeta": BackendRecord("zeta", "fake_zeta", "fake-zeta", "1.0", "<0.2,>=0.1", str(folder)),
    }
    assert list(discover()) == ["alpha", "zeta"]


PACKAGES = [("a", "a"), ("a:plugin", "a"), ("a.plugin", "a"), ("a.b.plugin : backend", "a.b")]


@pytest.mark.parametrize(("value", "package"), PACKAGES)
def test_the_package_behind_an_entry_point(value: str, package: str) -> None:
    assert BackendRecord("acme", value, "fake-acme", "1.0").package == package


def test_other_groups_and_damaged_metadata_of_others_do_not_matter(folder: Path) -> None:
    declare(folder, "other-1.dist-info", None, "[console_scripts]\nx = y:z\n")
    declare(folder, "odd-1.dist-info", None, "not an ini file")
    declare(folder, "latin-1.dist-info", None, "[caf\xe9]\n".encode("latin-1"))
    assert discover() == {}


def test_a_distribution_without_metadata_is_still_listed(folder: Path) -> None:
    declare(folder, "acme-1.dist-info", None, "[dsv4core.backends]\nacme = acme\n")
    assert discover()["acme"].title == "Backend 'acme' of a distribution without METADATA"


UNREADABLE = [
    ("[dsv4core.backends]\nacme\n", "Name: fake-acme\nVersion: 1\n"),
    ("[dsv4core.backends]\nacme = a\n", "Name: fake-acme\nVersion: 1\nRequires-Dist: dsv4core 0.1\n"),
]


@pytest.mark.parametrize(("entry_points", "metadata"), UNREADABLE)
def test_unreadable_declarations_are_isolated(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    entry_points: str,
    metadata: str,
) -> None:
    declare(folder, "acme-1.dist-info", metadata, entry_points)
    install_backend(folder, "other", BOOM)
    assert list(discover()) == ["other"]
    start = f"Backends that a distribution in {folder} declares cannot be read: "
    assert [message.startswith(start) for message in caplog.messages] == [True]
    monkeypatch.setenv("DSV4_STRICT", "1")
    with pytest.raises((TypeError, ValueError)):
        discover()


def test_stale_egg_info_with_the_same_target_is_the_same_backend(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install_backend(folder, "acme", BOOM, distribution="fake-acme")
    entry_points = "[dsv4core.backends]\nacme = fake_acme\n"
    declare(folder, "fake_acme.egg-info", "Name: Fake_Acme\nVersion: 1.0\n", entry_points)
    record = discover()["acme"]
    assert (record.value, record.problem) == ("fake_acme", None)
    assert caplog.messages == []


@pytest.mark.parametrize("value", ["fake_acme", "where_it_was"])
def test_copies_of_one_distribution_are_named_once(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    install_backend(folder, "acme", BOOM, distribution="fake-acme")
    entry_points = f"[dsv4core.backends]\nacme = {value}\n"
    declare(folder, "old/fake_acme.egg-info", "Name: fake-acme\nVersion: 0.1\n", entry_points)
    from importlib.metadata import distributions

    from dsv4core.framework import discovery

    paths = [str(folder), str(folder / "old")]
    monkeypatch.setattr(discovery, "distributions", lambda: distributions(path=paths))
    places = f"fake-acme 1.0 (as fake_acme in {folder}) and fake-acme 0.1 (as {value} in {folder / 'old'})"
    for _ in range(2):
        record = discover()["acme"]
        assert (record.value, record.problem) == ("fake_acme", None)
    assert caplog.messages == [
        f"Backend 'acme' is installed more than once: by {places}. The first on sys.path is used. "
        "Uninstall all but one."
    ]
    monkeypatch.setenv("DSV4_STRICT", "1")
    with pytest.raises(PluginError) as caught:
        discover()
    assert str(caught.value) == (
        f"[conflict] Backend 'acme' is installed more than once: by {places}. Uninstall all but one."
    )


def test_two_distributions_with_one_name_are_a_conflict(folder: Path) -> None:
    install_backend(folder, "acme", BOOM, distribution="fake-one")
    install_backend(folder, "acme", BOOM, distribution="fake-two", version="2.0")
    assert str(problem("acme")) == (
        f"[conflict] Backend 'acme' is declared more than once: by fake-one 1.0 (as fake_one in {folder}) "
        f"and fake-two 2.0 (as fake_two in {folder}). "
        "Uninstall all but one, or switch one off, as by DSV4_DISABLE=fake-two."
    )


def test_a_conflict_ends_when_one_distribution_is_switched_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_backend(folder, "acme", BOOM, distribution="fake-one")
    install_backend(folder, "acme", BOOM, distribution="fake-two", version="2.0")
    record = discover(["Fake_One"])["acme"]
    assert (record.distribution, record.problem) == ("fake-two", None)
    monkeypatch.setenv("DSV4_DISABLE", "fake-two")
    record = discover()["acme"]
    assert (record.distribution, record.problem) == ("fake-one", None)
    assert str(problem("acme", "fake-one")) == (
        "[disabled] Backend 'acme' is disabled. Take 'fake-one' out of plugins.disable."
    )


@pytest.mark.parametrize("value", ["", "fake acme", "fake_acme:", "a:b:c", "fake-acme"])
def test_declarations_that_name_no_object(folder: Path, value: str) -> None:
    declare(
        folder, "acme-1.dist-info", "Name: fake-acme\nVersion: 1\n", f"[dsv4core.backends]\nacme = {value}\n"
    )
    assert str(problem("acme")) == (
        f"[broken] Backend 'acme' of fake-acme 1 is declared as {value!r}, neither a module nor "
        "module:object. Repair or uninstall fake-acme."
    )


METADATA = [
    ("Version: 1.0\n", "a distribution without a name 1.0"),
    ("Name: fake-acme\n", "fake-acme"),
    ("Name: fake-acme\nVersion: 1\nRequires-Dist: dsv4core>=9; extra == 'future'\n", "fake-acme 1"),
]


@pytest.mark.parametrize(("metadata", "source"), METADATA)
def test_poor_metadata(folder: Path, metadata: str, source: str) -> None:
    declare(folder, "acme-1.dist-info", metadata, "[dsv4core.backends]\nacme = acme\n")
    record = discover()["acme"]
    assert (record.source, record.core, record.problem) == (source, "", None)


ASKS = [
    ("DSV4Core>=9", ">=9"),
    ("dsv4core >=0.1,<0.2", "<0.2,>=0.1"),
    ("dsv4core[triton]>=9", ">=9"),
    ("dsv4core<0.1; python_version < '3.9'", ""),
    ("dsv4core>=0.1; python_version >= '3.9'", ">=0.1"),
    ("dsv4core_extra>=9", ""),
    ("dsv4core", ""),
]


@pytest.mark.parametrize(("requires", "core"), ASKS)
def test_what_is_asked_of_the_core(folder: Path, requires: str, core: str) -> None:
    install_backend(folder, "acme", BOOM, requires=requires)
    assert discover()["acme"].core == core


@pytest.mark.parametrize(
    "name", ["auto", "not-a-name", "acme.", "1st", "acme..b", "True", "null", "nan", "\u00e9t\u00e9"]
)
def test_names_that_cannot_be_used(folder: Path, name: str) -> None:
    install_backend(folder, name, BOOM, distribution="fake-acme")
    assert str(problem(name)) == (
        f"[broken] fake-acme declares a backend named {name!r}, which is not a usable name. "
        "Use an identifier, or identifiers with dots between them, and neither 'auto' nor a literal."
    )


def test_a_vendor_may_have_a_name_space(folder: Path) -> None:
    install_backend(folder, "acme.fast", BOOM, distribution="fake-a")
    install_backend(folder, "acme.exact", BOOM, distribution="fake-b")
    assert [record.problem for record in discover().values()] == [None, None]


def test_disable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("acme", "other", "third", "fourth"):
        install_backend(folder, name, BOOM)
    monkeypatch.setenv("DSV4_DISABLE", "acme, fake_other")
    assert {name: record.problem is None for name, record in discover(["third"]).items()} == {
        "acme": False,
        "fourth": True,
        "other": False,
        "third": False,
    }
    assert str(problem("acme")) == "[disabled] Backend 'acme' is disabled. Take 'acme' out of DSV4_DISABLE."
    assert str(problem("other")) == (
        "[disabled] Backend 'other' is disabled. Take 'fake_other' out of DSV4_DISABLE."
    )
    assert str(problem("third", "third")) == (
        "[disabled] Backend 'third' is disabled. Take 'third' out of plugins.disable."
    )


def test_disabling_what_is_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_backend(folder, "acme", BOOM)
    monkeypatch.setenv("DSV4_DISABLE", "acne,flashmla")
    for _ in range(2):
        discover(["zzz"])
    assert caplog.messages == [
        "plugins.disable names 'zzz', which is no installed backend or distribution. "
        "`dsv4 plugins` lists them.",
        "DSV4_DISABLE names 'acne', which is no installed backend or distribution. Did you mean 'acme'?",
    ]


STRICT = [("auto", "fake-acme"), ("acme", "fake-one")]


@pytest.mark.parametrize(("name", "distribution"), STRICT)
def test_strict_raises_what_is_wrong_before_any_import(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, distribution: str
) -> None:
    install_backend(folder, name, BOOM, distribution=distribution)
    install_backend(folder, "acme", BOOM, distribution="fake-two")
    expected = problem(name)
    monkeypatch.setenv("DSV4_STRICT", "1")
    with pytest.raises(PluginError) as caught:
        discover()
    assert caught.value.reason == expected
    monkeypatch.setenv("DSV4_DISABLE", distribution)
    discover()


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
    assert str(absent_reason("nope", ["acme"])) == (
        "[package-missing] No backend is named 'nope'. "
        "The names are: acme, auto, flashinfer, flashmla, hopper, rocm_aiter."
    )
