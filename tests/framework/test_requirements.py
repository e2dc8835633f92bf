from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from dsv4core.api import PluginError, Reason, Request, Requirement
from dsv4core.framework.discovery import discover
from dsv4core.framework.manager import load_backend
from dsv4core.framework.requirements import requirement_reasons
from dsv4core.framework.selection import select
from dsv4core.testing.fakes import FAKE_BACKEND, altered, install_backend


def reasons(*requirements: Requirement) -> tuple[Reason, ...]:
    return requirement_reasons(requirements)


def pluggy(versions: str) -> Requirement:
    return Requirement("pluggy", "pluggy", "pip install -U pluggy", versions)


@pytest.mark.parametrize("versions", ["", ">=1", f"=={version('pluggy')}"])
def test_a_fitting_package_is_no_reason(versions: str) -> None:
    assert reasons(pluggy(versions)) == ()


def test_missing() -> None:
    assert reasons(Requirement("kernels_of_acme", "acme-kernels", "pip install acme-kernels", ">=2")) == (
        Reason(
            "package-missing",
            "It needs acme-kernels>=2, which is not installed.",
            "Run `pip install acme-kernels`.",
        ),
    )


def test_a_namesake() -> None:
    # `json` can be imported, but no distribution acme-json provides it: the case of `aiter` and amd-aiter.
    assert reasons(Requirement("json.decoder", "acme-json", "pip install acme-json")) == (
        Reason(
            "package-wrong",
            "It needs acme-json, but the installed 'json.decoder' is of another distribution.",
            "Uninstall that and run `pip install acme-json`.",
        ),
    )


def test_an_imported_namesake_without_a_spec() -> None:
    assert reasons(Requirement("__main__", "acme-main", "-"))[0].code == "package-wrong"


def test_both_versions_are_named() -> None:
    assert reasons(pluggy(">=99,<100"), pluggy("<1"), pluggy(">=1")) == (
        Reason(
            "package-version",
            f"It needs pluggy>=99,<100, and pluggy {version('pluggy')} is installed.",
            "Run `pip install -U pluggy`.",
        ),
        Reason(
            "package-version",
            f"It needs pluggy<1, and pluggy {version('pluggy')} is installed.",
            "Run `pip install -U pluggy`.",
        ),
    )


def test_a_version_that_means_nothing_does_not_fit(folder: Path) -> None:
    (folder / "odd-1.dist-info").mkdir()
    (folder / "odd-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: odd\nVersion: nightly\n"
    )
    assert reasons(Requirement("odd", "odd", "pip install odd", ">=2"))[0].text == (
        "It needs odd>=2, and odd nightly is installed."
    )
    assert reasons(Requirement("odd", "odd", "pip install odd")) == ()


def test_a_leftover_without_metadata_does_not_fit(folder: Path) -> None:
    (folder / "odd-1.dist-info").mkdir()
    assert reasons(Requirement("odd", "odd", "pip install odd", ">=1"))[0].text == (
        "It needs odd>=1, and odd of an unknown version is installed."
    )


@pytest.mark.parametrize("field", ["module", "distribution", "install"])
def test_a_requirement_is_complete(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} of a requirement is empty; name it.$"):
        Requirement(**{"module": "odd", "distribution": "odd", "install": "pip install odd", field: ""})


def test_another_distribution_may_provide_the_same() -> None:
    either = Requirement("pluggy", "acme-pluggy", "pip install acme-pluggy", ">=1", ("rocm-pluggy", "pluggy"))
    assert reasons(either) == ()
    newer = replace(either, version=">=99")
    assert reasons(newer)[0].text == f"It needs acme-pluggy>=99, and pluggy {version('pluggy')} is installed."


NEEDS = "requirements=(Requirement('flashfoo', 'flashfoo-python', 'pip install flashfoo-python', '>=0.6'),),"
NEEDY = altered(("capabilities=", NEEDS + "capabilities="), ("hookimpl,\n", "hookimpl, Requirement,\n"))


HOST_PROBE = "    assert request.probe == 'static'\n    return []\n"


def test_what_is_missing_is_not_probed(folder: Path, request_: Request) -> None:
    assert request_.probe == "host"
    install_backend(folder, "acme", altered(("    return []\n", HOST_PROBE), source=NEEDY))
    (folder / "flashfoo_python-0.5.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: flashfoo-python\nVersion: 0.5\n"
    (folder / "flashfoo_python-0.5.dist-info" / "METADATA").write_text(metadata)
    with pytest.raises(Exception, match="package-version") as caught:
        select(request_, "acme")
    assert str(caught.value) == (
        "backend=acme cannot run this request: [package-version] It needs flashfoo-python>=0.6, and "
        "flashfoo-python 0.5 is installed. Run `pip install flashfoo-python`. "
        "What could run here, if you name it: nothing that is installed."
    )


def test_a_specifier_that_is_none(folder: Path) -> None:
    install_backend(folder, "acme", altered(("'>=0.6'", "'0.6 or so'"), source=NEEDY))
    line = FAKE_BACKEND.split("capabilities=")[0].count("\n") + 1
    with pytest.raises(PluginError) as caught:
        load_backend(discover()["acme"])
    assert str(caught.value) == (
        "[broken] Backend 'acme' of fake-acme 1.0 cannot be loaded: InvalidSpecifier: Invalid specifier: "
        f"'0.6 or so' ({folder / 'fake_acme.py'}, line {line}). "
        "Repair or uninstall fake-acme; DSV4_STRICT=1 shows the traceback."
    )
