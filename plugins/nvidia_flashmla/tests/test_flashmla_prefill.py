"""Gathered prefills against the definition, behind decodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4core.api import C4A, C128A, SWA, LayerKind
from dsv4core.step import gathered
from dsv4core.testing.case import Case
from dsv4core.testing.host import Host
from dsv4core.testing.ledger import Ledger
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite import test_attention, test_indexer


@pytest.mark.parametrize("kind", [SWA, C4A, C128A], ids=lambda kind: kind.name)
@pytest.mark.parametrize("heads", [8, 128])
def test_gathered(dsv4: Subject, heads: int, kind: LayerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks; a request that the window holds, and one that it does not; queries in several turns."""
    from dsv4_plugin_flashmla import plugin

    monkeypatch.setattr(gathered, "gather_area", lambda *sizes: 600 if kind is C4A else 300)
    monkeypatch.setattr(gathered, "TABLE", 3000)
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


@pytest.mark.parametrize("phase", ["chunk", "prompts", "mixed"])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 71), slice(40, 68)], ids=str)
def test_scores_of_prompts(dsv4: Subject, rows: slice, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By DeepGEMM where the host has lengths, behind decodes that the core scores; of some queries, too."""
    from dsv4_plugin_flashmla import layer
    from dsv4_plugin_flashmla.layer import deepgemm

    monkeypatch.setattr(layer, "LEAST_QUERIES", 4)
    counts: list[int] = []
    products = deepgemm.prompt_logits

    def counted(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        counts.append(len(q))
        return products(q, *rest)

    monkeypatch.setattr(deepgemm, "prompt_logits", counted)
    ledger = Ledger(dsv4, test_indexer.case(host_lengths=True))
    steps = test_indexer.STEPS | {"mixed": ((600, 0, 200), (1, 70, 90))}
    step = test_indexer.run(ledger, *steps[phase])
    counts.clear()
    q, weights = test_indexer.queried(ledger, step)
    whole = test_indexer.logits(ledger, q, weights, step)
    lengths = step.host_lengths
    assert lengths is not None
    assert counts == [own for own in lengths.query[step.num_decode_requests :] if own >= 4]
    test_indexer.assert_logits(whole, ledger, step)
    part = test_indexer.logits(ledger, q, weights, step, rows)
    for token, (one, other) in enumerate(zip(part, whole[rows], strict=True), rows.start or 0):
        seen = int(step.positions[token] + 1) // 4
        torch.testing.assert_close(one[:seen], other[:seen], rtol=1e-3, atol=1e-3)
