"""The docs say what the code says: tables, hooks, codes, commands."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from dsv4core import api
from dsv4core.api import CAPABILITIES, REASON_CODES, hookspecs
from dsv4core.cli.main import COMMANDS
from dsv4core.testing.suite.marks import LEVELS

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))

spec = importlib.util.spec_from_file_location("docs_tables", DOCS / "tables.py")
assert spec is not None
assert spec.loader is not None
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_code(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it, kernels run on a CPU, too
    text = page.read_text()
    assert tables.written(text) == text, "run `python docs/tables.py`"


def test_every_hook_is_in_the_contract() -> None:
    """mkdocstrings writes signatures and texts from the code."""
    named = re.findall(r"^::: dsv4core\.api\.hookspecs\.(\w+)$", (DOCS / "contract.md").read_text(), re.M)
    hooks = [name for name in vars(hookspecs) if name.startswith("dsv4_")]
    assert sorted(named) == sorted(hooks)
    assert len(set(named)) == len(named)


def test_what_the_contract_names_is_public() -> None:
    named = re.findall(r"^::: dsv4core\.api\.(\w+)$", (DOCS / "contract.md").read_text(), re.M)
    assert named
    assert set(named) <= set(api.__all__)


def test_every_code_and_capability_is_explained() -> None:
    troubleshooting, contract = (DOCS / name for name in ("troubleshooting.md", "contract.md"))
    assert all(f"| `{code}` |" in troubleshooting.read_text() for code in REASON_CODES)
    assert all(f"| `{name}` |" in contract.read_text() for name in CAPABILITIES)


def test_every_level_is_explained() -> None:
    text = (DOCS / "writing.md").read_text()
    assert all(f"| {level} {name} |" in text for level, name in LEVELS.items())


def test_commands_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    used = set(re.findall(r"^dsv4 (\w+)", text, re.M)) | set(re.findall(r"`dsv4 (\w+)", text))
    assert used == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_is_in_the_menu(page: Path) -> None:
    assert f": {page.name}\n" in (DOCS.parent / "mkdocs.yml").read_text()
