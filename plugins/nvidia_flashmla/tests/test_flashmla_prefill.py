"""Gathered prefills against the definition, behind decodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv4core.api import C4A, C128A, SWA, LayerKind
from dsv4core.testing.case import Case
from dsv4core.testing.host import Host
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite import test_attention


@pytest.mark.parametrize("kind", [SWA, C4A, C128A], ids=lambda kind: kind.name)
@pytest.mark.parametrize("heads", [8, 128])
def test_gathered(dsv4: Subject, heads: int, kind: LayerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks; a request that the window holds, and one that it does not; queries in several turns."""
    from dsv4_plugin_flashmla import plugin, prefill

    monkeypatch.setattr(prefill, "gather_area", lambda *sizes: 600 if kind is C4A else 300)
    monkeypatch.setattr(prefill, "TABLE", 3000)
    subject = replace(dsv4, options=plugin.FlashMLAOptions(prefill="gather"))
    host = Host(subject, Case(kind, heads=heads, host_lengths=True))
    for query in ((1, 9, 5, 7), (12, 0, 1, 3)):
        test_attention.compare(host, (700, 300, 64, 0), query, want_lse=True)


@pytest.mark.parametrize("kind", [SWA, C4A, C128A], ids=lambda kind: kind.name)
def test_in_place(dsv4: Subject, kind: LayerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several calls a step, each with a schedule of its own."""
    from dsv4_plugin_flashmla import layer, plugin

    monkeypatch.setattr(layer, "MOST_ROWS", 8)
    subject = replace(dsv4, options=plugin.FlashMLAOptions(prefill="in_place"))
    host = Host(subject, Case(kind, heads=8, host_lengths=True))
    test_attention.compare(host, (700, 300, 64, 0), (1, 9, 5, 7), want_lse=True)
