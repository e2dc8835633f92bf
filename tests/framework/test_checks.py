"""What the core checks for every backend alike: requests, capabilities, models, and the backend's answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4core.api import BackendUnavailable, ConfigError, LayerKind, Request
from dsv4core.framework.selection import select
from dsv4core.testing.fakes import altered, install_backend

Install = Callable[..., None]


@pytest.fixture
def install(folder: Path) -> Install:
    def install(name: str, *replacements: tuple[str, str]) -> None:
        install_backend(folder, name, altered(*replacements))

    return install


def reasons(error: pytest.ExceptionInfo[BackendUnavailable], name: str) -> list[str]:
    decisions = {decision.backend: decision for decision in error.value.decisions}
    return [str(reason) for reason in decisions[name].reasons]


REQUESTS = [
    ({"seam": "kernal"}, "seam=kernal is not known; use layer or kernel."),
    ({"probe": "hots"}, "probe=hots is not known; use static or host."),
    ({"context_parallel": 0}, "context_parallel=0 is too small; the least is 1."),
    ({"decode_query_len": -1}, "decode_query_len=-1 is too small; the least is 1."),
    (
        {"arch": "sm_90"},
        "arch='sm_90' is no architecture of platform=cpu; write sm_90 for cuda, gfx942 for rocm, and nothing "
        "for a cpu.",
    ),
    (
        {"platform": "cuda", "arch": "90"},
        "arch='90' is no architecture of platform=cuda; write sm_90 for cuda, gfx942 for rocm, and nothing "
        "for a cpu.",
    ),
]


@pytest.mark.parametrize(("changes", "text"), REQUESTS)
def test_requests_that_cannot_be(request_: Request, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(request_, **changes)
    assert str(caught.value) == text


CAPABILITIES = [
    ({"decode_query_len": 2}, ["multi-token-decode"]),
    ({"graph": True}, ["graph"]),
    ({"deterministic": True}, ["deterministic"]),
    ({"strided_pages": True}, ["strided-pages"]),
    ({"tensor_parallel": 2, "num_heads": 8}, ["tensor-parallel"]),
    ({"seam": "kernel"}, ["kernel-seam"]),
    ({"context_parallel": 2}, ["lse", "defer-sink"]),
    ({"seam": "kernel", "graph": True}, ["kernel-seam", "graph"]),
]


@pytest.mark.parametrize(("asked", "needed"), CAPABILITIES)
def test_capabilities(
    install: Install, request_: Request, asked: dict[str, object], needed: list[str]
) -> None:
    install("acme")
    install("able", ("frozenset(),", f"frozenset({needed}),"))
    request = replace(request_, **asked)  # type: ignore[arg-type]
    assert select(request, "able").backend.name == "able"
    with pytest.raises(BackendUnavailable) as caught:
        select(request, "acme")
    assert [reason.split(" (")[0] for reason in reasons(caught, "acme")] == [
        f"[capability] The request needs {name!r}" for name in needed
    ]


def test_a_capability_is_named_with_its_meaning(install: Install, request_: Request) -> None:
    install("acme")
    with pytest.raises(BackendUnavailable) as caught:
        select(replace(request_, decode_query_len=3), "acme")
    assert reasons(caught, "acme") == [
        "[capability] The request needs 'multi-token-decode' (a decode request may have several query "
        "tokens), which it does not declare."
    ]


def test_host_lengths(install: Install, request_: Request) -> None:
    install("acme", ("frozenset(),", "frozenset({'needs-host-lengths'}),"))
    assert select(request_, "acme").backend.name == "acme"
    with pytest.raises(BackendUnavailable) as caught:
        select(replace(request_, host_lengths=False), "acme")
    assert reasons(caught, "acme") == [
        "[capability] It needs the lengths of a step on the host, and the host has none. "
        "Give Step.host_lengths."
    ]


def test_kinds_that_share_a_name_are_refused(install: Install, request_: Request) -> None:
    install("acme")
    kinds = tuple(LayerKind(4, "top_k", True, index_source=source) for source in (None, 0))
    model = replace(request_.model, layer_kinds=kinds)
    with pytest.raises(BackendUnavailable) as caught:
        select(replace(request_, model=model), "acme")
    assert reasons(caught, "acme") == [
        "[model] The model has 2 kinds of layers named c4a, and plans go by name."
    ]


ANSWERS = [
    ("return []", "pass", "returned None from dsv4_unsupported_reasons, where a value is due."),
    ("return []", "return ''", "returned something else than Reasons from dsv4_unsupported_reasons."),
    (
        "return []",
        "return (r for r in [])",
        "returned something else than Reasons from dsv4_unsupported_reasons.",
    ),
    ("return []", "return ['no']", "returned something else than Reasons from dsv4_unsupported_reasons."),
    (
        "return KVCacheLayout(row, row, row, row)",
        "pass",
        "returned None from dsv4_resolve_kv_cache, where KVCacheLayout is due.",
    ),
    ("return LayerPlan(", "return dict(", "returned dict from dsv4_plan_layer, where LayerPlan is due."),
    (
        "padded_q_heads=layer.num_heads",
        "padded_q_heads=8",
        "plans 8 query heads for a layer that has 16 of them.",
    ),
    (
        "own_ops=frozenset()",
        "own_ops=frozenset({'compress'})",
        "plans to do compress itself, but does not implement dsv4_compress.",
    ),
]


@pytest.mark.parametrize(("old", "new", "what"), ANSWERS)
def test_answers_that_break_the_contract(
    install: Install, request_: Request, old: str, new: str, what: str
) -> None:
    install("acme", (old, new))
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, "acme")
    assert reasons(caught, "acme") == [
        f"[broken] Backend 'acme' of fake-acme 1.0 {what} Repair or uninstall fake-acme."
    ]


VALUES = [
    (
        "row, row, row, row",
        "row, None, row, row",
        "compressed=None of a layout cannot be; give a KVCacheFormat",
    ),
    (
        "padded_q_heads=layer.num_heads",
        "padded_q_heads=None",
        "padded_q_heads=None of a plan cannot be; give a number",
    ),
    ("own_ops=", "workspace_bytes=-5, own_ops=", "workspace_bytes=-5 of a plan cannot be; give a number"),
    ("own_ops=", "notes='one', own_ops=", "notes='one' of a plan cannot be; give a tuple of lines"),
    ("own_ops=", "notes=['one'], own_ops=", "notes=['one'] of a plan cannot be; give a tuple of lines"),
    ("own_ops=", "notes=(1,), own_ops=", "notes=(1,) of a plan cannot be; give a tuple of lines"),
    ("own_ops=", "output='bf16', own_ops=", "output='bf16' of a plan cannot be; give an OutputSpec"),
]


@pytest.mark.parametrize(("old", "new", "what"), VALUES)
def test_answers_of_odd_values(install: Install, request_: Request, old: str, new: str, what: str) -> None:
    install("acme", (old, new))
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, "acme")
    assert reasons(caught, "acme")[0].startswith(f"[probe-error] Its checks raised ValueError: {what}")


def test_private_output_may_be_forbidden(install: Install, request_: Request) -> None:
    plan = "from dsv4core.api import OutputSpec\n    return LayerPlan(output=OutputSpec('private'), "
    declared = ("frozenset(),", "frozenset({'private-output'}),")
    install("acme", ("return LayerPlan(", plan), declared)
    assert select(request_, "acme").plans["swa"].output.format == "private"
    with pytest.raises(BackendUnavailable, match="private attention output, which the request forbids"):
        select(replace(request_, private_output=False), "acme")


def test_private_output_must_be_declared(install: Install, request_: Request) -> None:
    plan = "from dsv4core.api import OutputSpec\n    return LayerPlan(output=OutputSpec('private'), "
    install("acme", ("return LayerPlan(", plan))
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, "acme")
    assert reasons(caught, "acme") == [
        "[broken] Backend 'acme' of fake-acme 1.0 plans a private attention output, and does not declare "
        "'private-output'. Repair or uninstall fake-acme."
    ]
