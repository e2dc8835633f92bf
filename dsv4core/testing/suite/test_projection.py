"""L5: the output projection, alone where the attention output is dense, and behind attention."""

from __future__ import annotations

import json

import pytest
import torch

from dsv4core.api import C4A, SWA, AttentionOutput, LayerKind, Limits, Weight
from dsv4core.framework.binding import BoundLayer
from dsv4core.model.random_checkpoint import random_layer
from dsv4core.testing import oracle
from dsv4core.testing.case import NAN, Case
from dsv4core.testing.compare import assert_rows, assert_same
from dsv4core.testing.host import Host
from dsv4core.testing.subject import MODEL, Subject
from dsv4core.testing.suite.marks import check
from dsv4core.testing.tolerances import PROJECTION


def projection_weights(host: Host, seed: int = 0) -> dict[str, Weight]:
    """This rank's shards of `wo_a` (by rows) and `wo_b` (by columns)."""
    whole, case = random_layer(host.case.model, 0, seed), host.case
    return {name: _shard(whole[name], axis, case, host.device) for axis, name in enumerate(("wo_a", "wo_b"))}


def _shard(weight: Weight, axis: int, case: Case, device: torch.device) -> Weight:
    assert weight.scale is not None
    data, scale = (t.chunk(case.ranks, axis)[case.rank] for t in (weight.data, weight.scale))
    return Weight(data.contiguous().to(device), scale.contiguous().to(device), weight.block)


def random_attention(heads: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """An attention output of all heads of a model, `[tokens, heads, head_dim]` bf16: nobody has to round."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, MODEL.head_dim, generator=random).bfloat16()


def output_of_rank(host: Host, attention: torch.Tensor) -> AttentionOutput:
    """This rank's heads of it as the backend would hand them over."""
    first = host.spec.head_start
    data = attention[:, first : first + host.spec.num_heads].to(host.device)
    padding = host.plan.padded_q_heads - host.spec.num_heads if host.plan.output.padded else 0
    dtype = getattr(torch, host.subject.dtype)
    return AttentionOutput(torch.nn.functional.pad(data, (0, 0, 0, padding)).to(dtype))


def expected_projection(
    host: Host, attention: torch.Tensor, positions: torch.Tensor, weights: dict[str, Weight]
) -> torch.Tensor:
    """The definition's result for a dense output, rotated back or not as the plan says."""
    turn = None if host.plan.output.inverse_rotated else positions
    heads = attention[:, : host.spec.num_heads]
    return oracle.project(heads, turn, host.rope, weights["wo_a"], weights["wo_b"], host.spec.num_groups)


def compare(host: Host, layer: BoundLayer, weights: dict[str, Weight], positions: torch.Tensor) -> None:
    """Project random rows, against the definition."""
    attention = random_attention(host.case.heads, positions.shape[0])
    found = layer.o_proj(output_of_rank(host, attention), positions)
    expected = expected_projection(host, attention, positions, weights)
    assert_rows(found, expected, PROJECTION[host.subject.dtype], "output projection")


@check("L5", core=True, reports=("Primus#930", "vllm#55695"))
@pytest.mark.parametrize("tokens", [0, 1, 5, 64, 321])
def test_rotating_back_and_projecting(dsv4: Subject, tokens: int) -> None:
    """Rotated back at the query's own position, then both products."""
    host = Host(dsv4, Case(C4A))
    weights = projection_weights(host)
    positions = torch.randperm(4096, generator=host.random)[:tokens].to(host.device)
    compare(host, host.bind(host.sinks, weights), weights, positions)


@check("L5", reports=("vllm#55526",))
@pytest.mark.parametrize("heads", [1, 4, 8, 16, 32, 128])
def test_projection_of_any_heads(dsv4: Subject, heads: int) -> None:
    """Any head count that the backend serves."""
    host = Host(dsv4, Case(SWA, heads))
    weights = projection_weights(host)
    compare(host, host.bind(host.sinks, weights), weights, torch.arange(7, device=host.device))


@check("L5", core=True, reports=("vllm#54815", "transformers#45910", "atlas#276"))
@pytest.mark.parametrize("kind", [pytest.param(SWA, id="swa"), pytest.param(C4A, id="c4a")])
def test_far_positions(dsv4: Subject, kind: LayerKind) -> None:
    """Angles of positions that bf16 does not hold, from the table of the layer's own kind."""
    limits = Limits(max_tokens=64, max_requests=1, max_model_len=200_000, max_query_len=64)
    host = Host(dsv4, Case(kind, limits=limits))
    weights = projection_weights(host)
    positions = torch.tensor([0, 255, 257, 4095, 65_537, 131_071, 199_999], device=host.device)
    compare(host, host.bind(host.sinks, weights), weights, positions)


@check("L5", core=True, reports=("Primus#930",))
@pytest.mark.parametrize("private", [False, True])
def test_attention_and_projection(dsv4: Subject, private: bool) -> None:
    """Both together, also where the backend keeps what lies between them to itself."""
    host = Host(dsv4, Case(C4A, private_output=private))
    weights = projection_weights(host)
    layer = host.bind(host.sinks, weights)
    step = host.step((2000, 129, 0), (1, 1, 40))
    q, selected = host.query(step), host.select(step)
    found = layer.o_proj(host.attend(step, q, selected, layer=layer), step.positions)
    attention, _ = host.expected(step, q, selected, host.sinks)
    expected = expected_projection(host, attention, step.positions, weights)
    assert_rows(found, expected, PROJECTION[dsv4.dtype], "output projection", step)


@check("L5", needs=("tensor-parallel",), reports=("sglang#35092",))
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_add_up(dsv4: Subject, ranks: int) -> None:
    """Each rank gives its partial sum; the host's sum of them is what one rank alone would give."""
    positions = torch.arange(100, 109, device=dsv4.device)
    total = torch.zeros(9, MODEL.hidden_size, device=dsv4.device)
    for rank in range(ranks):
        host = Host(dsv4, Case(SWA, ranks=ranks, rank=rank), seed=rank)
        layer = host.bind(host.sinks, projection_weights(host))
        total += layer.o_proj(output_of_rank(host, random_attention(64, 9)), positions).float()
    alone = Host(dsv4, Case(SWA))
    expected = expected_projection(alone, random_attention(64, 9), positions, projection_weights(alone))
    assert_rows(total, expected, PROJECTION[dsv4.dtype], "sum of the ranks' projections")


@check("L5", needs=("deterministic",), reports=("sglang#36174", "vllm#53257"))
def test_a_rows_projection_does_not_depend_on_its_batch(dsv4: Subject) -> None:
    """The same row alone and among others, wherever it stands: the same bits."""
    host = Host(dsv4, Case(C4A, deterministic=True))
    layer = host.bind(host.sinks, projection_weights(host))
    rows, positions = random_attention(64, 64), torch.arange(64, device=host.device)
    alone = layer.o_proj(output_of_rank(host, rows[:1]), positions[:1])
    for others, place in ((2, 1), (16, 7), (63, 63)):
        order = [*range(1, place + 1), 0, *range(place + 1, others + 1)]
        found = layer.o_proj(output_of_rank(host, rows[order]), positions[order])
        assert_same(found[place], alone[0], "A row's projection depends on the other rows of its batch")


@check("L5", core=True)
def test_weights_are_the_hosts(dsv4: Subject) -> None:
    """Weights are read only, and those that the plan consumes are not needed once a layer is built."""
    host = Host(dsv4, Case(C4A))
    weights = projection_weights(host)
    kept = projection_weights(host)
    layer = host.bind(host.sinks, weights)
    for name, weight in weights.items():
        assert_same(weight.data, kept[name].data, f"Building the layer wrote to {name}")
        if name in host.plan.consumes:
            weight.data.view(torch.uint8).fill_(NAN)
            if weight.scale is not None:
                weight.scale.view(torch.uint8).fill_(NAN)
    compare(host, layer, kept, torch.arange(9, device=host.device))


@check("L5", core=True)
def test_description(dsv4: Subject) -> None:
    """What a layer says of its state can be logged, and says how large the prepared weights are."""
    host = Host(dsv4, Case(C4A))
    facts = host.bind(host.sinks, projection_weights(host)).describe()
    json.dumps(facts)
    if dsv4.backend.implements("dsv4_describe"):
        size = facts.get("prepared_bytes")
        assert isinstance(size, int), f"prepared_bytes={size!r} of dsv4_describe is no number of bytes."
        assert size >= 0, f"prepared_bytes={size} of dsv4_describe is negative."
