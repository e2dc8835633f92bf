"""A little of the suite: on a CPU it takes minutes for a GPU's second. On sm_90 all of it runs."""

from __future__ import annotations

import pytest

from dsv4core.api import C4A, C128A, SWA, LayerKind
from dsv4core.testing.case import Case
from dsv4core.testing.host import Host
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite import test_attention


@pytest.mark.parametrize("kind", [SWA, C4A, C128A], ids=lambda kind: kind.name)
def test_mixed_steps(dsv4: Subject, kind: LayerKind) -> None:
    """Decodes before prefills; requests share rows of a table where layers choose nothing."""
    host = Host(dsv4, Case(kind, heads=5, host_lengths=True))
    test_attention.compare(host, (700, 300, 64, 0), (1, 1, 2, 3), want_lse=True)


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3"])
def test_formats(dsv4: Subject, format: str) -> None:
    host = Host(dsv4, Case(C128A, heads=3, kv_cache_dtype=format))
    test_attention.compare(host, (300, 140), (1, 2))


def test_padding(dsv4: Subject) -> None:
    """Rows of nobody, as graphs have them."""
    test_attention.test_nothing_to_attend_gives_zero(dsv4, C128A)
