"""L4: steps follow each other, and layers share them."""

from __future__ import annotations

import pytest

from dsv4core.api import C4A, C128A, SWA, LayerKind, Step
from dsv4core.testing.case import Case
from dsv4core.testing.compare import assert_attention
from dsv4core.testing.host import INT_MAX, Host
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite.marks import check

KINDS = [pytest.param(kind, id=kind.name) for kind in (SWA, C4A, C128A)]


def attend_and_compare(host: Host, step: Step) -> None:
    """Attention of a planned step, against the definition."""
    q, selected = host.query(step), host.select(step)
    output = host.attend(step, q, selected)
    expected, _ = host.expected(step, q, selected, host.sinks)
    assert_attention(host.heads(output), expected, step, host.plan.q_dtype)


@check("L4", core=True, reports=("vllm#51318", "sglang#29885"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host_lengths", [None, True], ids=["as-needed", "host-lengths"])
def test_steps_follow_each_other(dsv4: Subject, host_lengths: bool | None, kind: LayerKind) -> None:
    """Every step has its own lengths and tables, in the same buffers."""
    host = Host(dsv4, Case(kind, host_lengths=host_lengths))
    computed: tuple[int, ...] = (300, 0, 1000)
    for query in ((1, 90, 30), (1, 30, 90), (1, 1, 1), (1, 1, 1), (1, 27, 0), (1, 1, 120)):
        attend_and_compare(host, host.step(computed, query))
        computed = tuple(known + new for known, new in zip(computed, query, strict=True))
    attend_and_compare(host, host.step((2047,), (1,)))


@check("L4", core=True, reports=())
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_a_kind_share_a_step(dsv4: Subject, kind: LayerKind) -> None:
    """A step is planned once; each layer has its own sinks and chosen entries."""
    host = Host(dsv4, Case(kind))
    step = host.step((600, 129, 0), (1, 1, 20))
    for _ in range(3):
        sinks = host.normal(host.spec.num_heads)
        q, selected = host.query(step), host.select(step)
        output = host.attend(step, q, selected, layer=host.bind(sinks))
        expected, _ = host.expected(step, q, selected, sinks)
        assert_attention(host.heads(output), expected, step, host.plan.q_dtype)


@check("L4", core=True)
@pytest.mark.parametrize("kind", KINDS)
def test_two_groups_of_block_tables(dsv4: Subject, kind: LayerKind) -> None:
    """A host may keep the caches of one kind in groups, each with a state: planning one leaves the other."""
    hosts = [Host(dsv4, Case(kind, heads=0), seed) for seed in (1, 2)]
    steps = [
        host.step(computed, (1,) * len(computed))
        for host, computed in zip(hosts, ((700, 3, 300), (129, 2000)), strict=True)
    ]
    for host, step in zip(hosts, steps, strict=True):
        attend_and_compare(host, step)


@check("L4", needs=("multi-token-decode",), reports=("flashinfer#3828", "vllm#51593", "1Cat-vLLM#603"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_several_query_tokens(dsv4: Subject, drafts: int, kind: LayerKind) -> None:
    """Decodes with drafts, each query at its own position; some requests have fewer of them."""
    host = Host(dsv4, Case(kind, decode_query_len=drafts + 1))
    step = host.step((500, 129, 3, 255, 0), (drafts + 1, drafts, 1, drafts + 1, 10))
    assert step.num_decode_requests == 4
    attend_and_compare(host, step)


@check("L4", core=True, reports=("vllm#55695", "vllm#51106", "sglang#31705"))
@pytest.mark.parametrize("kind", KINDS)
def test_empty_steps(dsv4: Subject, kind: LayerKind) -> None:
    """No request, no query token, and requests without any among others."""
    host = Host(dsv4, Case(kind))
    for computed, query in (((), ()), ((0, 0), (0, 0)), ((300, 200, 70, 0), (1, 0, 5, 3))):
        attend_and_compare(host, host.step(computed, query))


@check("L4", core=True, reports=("vllm#55637", "flashinfer#5015", "ROCm/ATOM#1595"))
@pytest.mark.parametrize("kind", KINDS)
def test_tables_may_hold_anything_that_is_not_reached(dsv4: Subject, kind: LayerKind) -> None:
    """Before a window lie pages that are not the request's any more, behind a length whatever was there."""
    host = Host(dsv4, Case(kind))
    step = host.build((700, 130, 0), (1, 1, 20))
    tables = [(step.window.block_table, host.case.page_sizes.window)]
    if kind.ratio is not None:
        tables.append((step.compressed[kind.name].block_table, host.case.page_sizes.context))
    for table, tokens in tables:
        for request, length in enumerate(step.seq_lens.tolist()):
            table[request, -(-length // tokens) :] = INT_MAX
    tokens = host.case.page_sizes.window
    for request, known in enumerate((700, 130, 0)):
        step.window.block_table[request, : max(0, known - host.spec.model.sliding_window + 1) // tokens] = 0
    host.plan_step(step)
    attend_and_compare(host, step)
