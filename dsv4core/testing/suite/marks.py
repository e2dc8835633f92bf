"""What a check is: its level, whether it may be refused, what it needs, which reports it stands for."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dsv4core.api import CAPABILITIES, OWN_OPS

LEVELS = {
    "L0": "contract",
    "L1": "call shape",
    "L2": "caches",
    "L3": "numbers",
    "L4": "steps",
    "L5": "output projection",
}


def check(
    level: str,
    *,
    core: bool = False,
    needs: Iterable[str] = (),
    owned: Iterable[str] = (),
    reports: Iterable[str] = (),
) -> pytest.MarkDecorator:
    """Mark a test as a check of the suite.

    Args:
        level: One of `LEVELS`.
        core: Whether every backend has to pass it on a machine of its own: refusing is failing.
        needs: Capabilities without which it does not apply.
        owned: Operations that it is about; a backend that owns none of them leaves them to the core.
        reports: Public reports of what goes wrong where it fails.
    """
    unknown = sorted({*needs} - {*CAPABILITIES} | {*owned} - OWN_OPS)
    if level not in LEVELS or unknown:
        raise ValueError(f"level {level!r}, capabilities or operations {unknown} of a check are not known.")
    marks = {"needs": tuple(needs), "owned": tuple(owned), "reports": tuple(reports)}
    return pytest.mark.dsv4(level=level, core=core, **marks)


large = pytest.mark.dsv4_large
"""Marks a case that takes gigabytes or minutes; `--dsv4-quick` leaves it out."""
