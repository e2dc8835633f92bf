"""Every symbol that a route takes, at sizes that reach it: the real ones on an AMD GPU, else the stub's.

pytest -m rocm plugins/rocm_aiter/tests/test_aiter_on_amd.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsv4_plugin_rocm_aiter import calls, layer
from stub_aiter import ON_AMD, Install

from dsv4core import ops
from dsv4core.api import C4A, C128A, SWA, LayerKind, Limits
from dsv4core.testing.case import Case
from dsv4core.testing.host import Host
from dsv4core.testing.ledger import Ledger
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite import test_attention, test_indexer, test_projection

KINDS = [pytest.param(kind, id=kind.name) for kind in (SWA, C4A, C128A)]
FORMATS = ("fp8_ds_mla", "bf16")
PROMPTS = ((0, 700), (600, 450))
"""Tokens that are cached, and new ones: OPUS is taken from 1,024 new ones on."""
LIMITS = Limits(max_tokens=1100, max_requests=2, max_model_len=2048, max_query_len=1100)


@pytest.fixture(params=["gfx942", "gfx950", pytest.param("here", marks=pytest.mark.rocm)])
def subject(request: pytest.FixtureRequest, install: Install) -> Subject:
    """The backend on stubs of both chips, and on the GPU that is here."""
    if request.param != "here":
        return install(request.param)
    if not ON_AMD:
        pytest.skip("no GPU of AMD's is here")
    return Subject("rocm_aiter", device=torch.device("cuda"))


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The operations that AITER is called for."""
    found: set[str] = set()

    def noted(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.add(op)
            return function(*args, **kwargs)

        return call

    by_op = {"index_logits": "prompt_logits", "index_topk": "top_k"}
    by_op |= {"inverse_rope_quant": "quantised", "o_proj": "grouped_product"}
    for op, name in by_op.items():
        monkeypatch.setattr(calls, name, noted(op, getattr(calls, name)))
    for op, name in (("decode", "DECODES"), ("prefill", "PREFILLS")):
        known = {symbol: noted(op, own) for symbol, own in getattr(calls, name).items()}
        monkeypatch.setattr(layer, name, known)
    return found


def planned(plan: Any, *ops: str) -> set[str]:
    return {op for op in ops if plan.symbol(op) is not None}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_decode(subject: Subject, reached: set[str], kind: LayerKind, format: str) -> None:
    host = Host(subject, Case(kind, heads=8, kv_cache_dtype=format))
    test_attention.compare(host, *test_attention.STEPS["decode"])
    assert reached == planned(host.plan, "decode")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_prefill(subject: Subject, reached: set[str], kind: LayerKind, format: str) -> None:
    case = Case(kind, heads=8, kv_cache_dtype=format, limits=LIMITS, host_lengths=True)
    host = Host(subject, case)
    test_attention.compare(host, *PROMPTS)
    assert reached == planned(host.plan, "prefill") == {"prefill"}


def test_index_logits_and_topk(subject: Subject, reached: set[str]) -> None:
    ledger = Ledger(subject, test_indexer.case(host_lengths=True))
    step = test_indexer.run(ledger, *test_indexer.STEPS["prompts"])
    scores = test_indexer.logits(ledger, *test_indexer.queried(ledger, step), step)
    test_indexer.assert_logits(scores, ledger, step)
    visible = (step.positions + 1) // 4
    k = ledger.case.index_topk
    found = ledger.attention.bound.index_topk(scores, visible, step)
    assert torch.equal(found, ops.index_topk(scores, visible, k))
    assert reached == planned(ledger.plan, "index_logits", "index_topk")


@pytest.mark.parametrize("tokens", [1, 300])
def test_projection_in_fp8(subject: Subject, reached: set[str], tokens: int) -> None:
    host = Host(subject, Case(SWA, heads=16))
    weights = test_projection.projection_weights(host)
    positions = torch.randperm(4096, generator=host.random)[:tokens].to(subject.device)
    test_projection.compare(host, host.bind(host.sinks, weights), weights, positions)
    assert reached == planned(host.plan, "inverse_rope_quant", "o_proj")
