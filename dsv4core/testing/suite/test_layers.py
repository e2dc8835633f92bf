"""L3: whole layers at the layer seam, from hidden states to this rank's partial sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsv4core.api import C4A, C128A, SWA, LayerKind, LayerScales, Limits
from dsv4core.model.shapes import PRESETS
from dsv4core.stack import AttentionStack
from dsv4core.testing.case import Case
from dsv4core.testing.compare import assert_rows
from dsv4core.testing.layers import backend_stack, caches_of, hidden_states, reference_stack
from dsv4core.testing.subject import Elsewhere, Subject
from dsv4core.testing.suite.marks import check, large
from dsv4core.testing.suite.test_attention import FORMATS
from dsv4core.testing.tolerances import layer_tolerance

KINDS = [pytest.param(kind, id=kind.name) for kind in (SWA, C4A, C128A)]
LIMITS = Limits(max_tokens=600, max_requests=3, max_model_len=1200, max_query_len=600)


def case(kind: LayerKind, **changes: Any) -> Case:
    """A layer whose indexer has to choose from 600 tokens on, of a host with lengths."""
    given = Case(kind, index_topk=128, limits=LIMITS, private_output=True, host_lengths=True)
    return replace(given, **changes)


def compare(
    ours: AttentionStack,
    theirs: AttentionStack,
    computed: tuple[int, ...],
    query: tuple[int, ...],
    seed: int = 0,
) -> None:
    """One step of every layer on both; the reference attends the entries that the backend chose."""
    step, their_step = ours.plan(computed, query), theirs.plan(computed, query)
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        hidden = hidden_states(sum(query), ours, seed + layer.spec.index)
        found, selected = ours.attend(layer, hidden, step)
        expected, _ = theirs.attend(other, hidden, their_step, selected)
        tolerance = layer_tolerance(
            ours.selection.request.dtype, ours.selection.plans[layer.spec.kind.name].q_dtype
        )
        assert_rows(found, expected, tolerance, f"output of a {layer.spec.kind.name} layer", step)


def run(ours: AttentionStack) -> None:
    """Prompts in chunks, then decodes, beside each other."""
    theirs = reference_stack(ours)
    computed: tuple[int, ...] = (0, 0, 0)
    for seed, query in enumerate(((520, 30, 0), (1, 200, 7), (1, 1, 300), (1, 1, 1), (1, 0, 1))):
        compare(ours, theirs, computed, query, seed * 10)
        computed = tuple(known + new for known, new in zip(computed, query, strict=True))


@check("L3", core=True, reports=("vllm#47783", "vllm#55927", "sglang#36390"))
@pytest.mark.parametrize("kind", KINDS)
def test_layer(dsv4: Subject, kind: LayerKind) -> None:
    """Prompts in chunks, then decodes, beside each other."""
    run(backend_stack(dsv4, case(kind)))


@check("L3", needs=("strided-pages",), reports=("vllm#47783",))
def test_layer_with_strided_pages(dsv4: Subject) -> None:
    """The same in pools that other caches share."""
    run(backend_stack(dsv4, case(C4A, page_gap=3)))


@check("L3", reports=("sglang#36390",))
def test_layer_of_a_host_without_lengths(dsv4: Subject) -> None:
    """The same where no length is known on the host, and no output is private."""
    run(backend_stack(dsv4, case(C4A, host_lengths=False, private_output=False)))


@large
@check("L3", reports=("vllm#55927", "vllm#47783"))
@pytest.mark.parametrize("kind", KINDS)
def test_layer_of_real_size(dsv4: Subject, kind: LayerKind) -> None:
    """A layer of DeepSeek-V4-Flash: 4,096 hidden, the best 512 of more entries, chunks of 2,048."""
    limits = Limits(max_tokens=2048, max_requests=2, max_model_len=2304, max_query_len=2048)
    flash = replace(PRESETS["v4_flash"], draft_layer_kinds=())
    ours = backend_stack(dsv4, case(kind, index_topk=512, limits=limits, sizes=flash))
    theirs = reference_stack(ours)
    for computed, query in (((0,), (2048,)), ((2048, 0), (100, 5)), ((2148, 5), (1, 1))):
        compare(ours, theirs, computed, query)


@check("L3", reports=("vllm#47174", "sglang#33194"))
@pytest.mark.parametrize("format", FORMATS)
def test_layers_in_each_format(dsv4: Subject, format: str) -> None:
    """All kinds in one model, in each cache format that the backend accepts."""
    limits = Limits(max_tokens=140, max_requests=1, max_model_len=150, max_query_len=140)
    ours = backend_stack(dsv4, case(SWA, others=(C4A, C128A), limits=limits, kv_cache_dtype=format))
    theirs = reference_stack(ours)
    compare(ours, theirs, (0,), (140,))
    compare(ours, theirs, (140,), (1,), 10)


@check("L3", reports=("vllm#43827",))
def test_layers_with_scales(dsv4: Subject) -> None:
    """All kinds, with scales of plain FP8 caches and queries that are not 1."""
    limits = Limits(max_tokens=140, max_requests=1, max_model_len=150, max_query_len=140)
    scales = LayerScales(q=0.05, kv=0.0375)
    changes: dict[str, Any] = {
        "others": (C4A, C128A),
        "limits": limits,
        "kv_cache_dtype": "fp8_e4m3",
        "scales": scales,
    }
    ours = backend_stack(dsv4, case(SWA, **changes))
    if caches_of(ours).window.scale is None:
        raise Elsewhere("Its rows have no scale of their cache.")
    theirs = reference_stack(ours)
    compare(ours, theirs, (0,), (140,))
    compare(ours, theirs, (140,), (1,), 10)


@check("L3", needs=("multi-token-decode",), reports=("TensorRT-LLM#17892", "mlx-vlm#1896"))
@pytest.mark.parametrize("kind", KINDS)
def test_layer_with_drafts(dsv4: Subject, kind: LayerKind) -> None:
    """Decodes of several query tokens, some of which are taken back."""
    ours = backend_stack(dsv4, case(kind, decode_query_len=4))
    theirs = reference_stack(ours)
    compare(ours, theirs, (0, 0), (254, 126))
    compare(ours, theirs, (254, 126), (4, 4), 10)
    compare(ours, theirs, (256, 130), (4, 3), 20)
    compare(ours, theirs, (257, 131), (4, 4), 30)
