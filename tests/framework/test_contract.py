"""The contract changes only on purpose: `contract.txt` records every signature and public field."""

from __future__ import annotations

import difflib
from pathlib import Path

import contract
import pytest

from dsv4core.api import BackendInfo, hookspecs

GOLDEN = Path(__file__).parent / "contract.txt"
ADVICE = """The contract has changed. If that is meant, keep to what API_VERSION promises and run
    python tests/framework/contract.py > tests/framework/contract.txt"""


def test_the_contract_is_the_recorded_one() -> None:
    recorded, found = GOLDEN.read_text().splitlines(), contract.describe().splitlines()
    changes = "\n".join(difflib.unified_diff(recorded, found, lineterm="", n=0))
    assert not changes, f"{changes}\n\n{ADVICE}"


def added_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hookspecs, "dsv4_added", hookspecs.dsv4_plan_step, raising=False)


def optional_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hookspecs, "MANDATORY", hookspecs.MANDATORY - {"dsv4_plan_step"})


def renamed_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackendInfo.__dataclass_fields__["summary"], "name", "about")


def changed_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hookspecs.dsv4_o_proj.__annotations__, "positions", "list[int]")


@pytest.mark.parametrize("change", [added_hook, optional_hook, renamed_field, changed_argument])
def test_changes_are_seen(monkeypatch: pytest.MonkeyPatch, change: object) -> None:
    change(monkeypatch)  # type: ignore[operator]
    assert contract.describe() != GOLDEN.read_text()


def test_hooks_are_in_the_order_of_a_layers_life() -> None:
    lines = GOLDEN.read_text().split("\n\n")[0].splitlines()[1:]
    names = [line.split("(")[0].split()[-1] for line in lines]
    assert names[0] == "dsv4_backend_info"
    assert names.index("dsv4_plan_layer") < names.index("dsv4_init_layer_buffers")
    assert names.index("dsv4_plan_step") < names.index("dsv4_forward_mqa") < names.index("dsv4_o_proj")
    assert set(hookspecs.MANDATORY) <= set(names)
