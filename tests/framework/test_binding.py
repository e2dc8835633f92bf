from __future__ import annotations

import logging
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pluggy
import pytest

from dsv4core.api import C4A, SWA, LayerKind, LayerSpec, PluginError, Request
from dsv4core.framework import binding
from dsv4core.framework.binding import bind, bind_kind, bind_layer
from dsv4core.framework.selection import Selection, select
from dsv4core.testing.fakes import FAKE_BACKEND, altered, install_backend

Choose = Callable[..., Selection]
HOT = ("q", "caches", "selected", "positions", "step", "kind_state", "out", True, False)
OWN_OPS = """
@hookimpl
def dsv4_insert_kv(layer, state, q, kv, positions, caches, step):
    return ("insert_kv", layer.index, q, kv, positions, caches, step)

@hookimpl
def dsv4_compress(target, step, projected, state):
    assert (target, step, projected, state[0]) == ("index", "step", "projected", "layer")

@hookimpl
def dsv4_index_logits(q, weights):
    return ("index_logits", q, weights)

@hookimpl
def dsv4_prepare_step(step, kind_state):
    seen.append((step, kind_state[:2]))

@hookimpl
def dsv4_describe(state):
    return {"kernel": "none", "layer": state[1]}

seen = []
"""


@pytest.fixture
def choose(folder: Path, request_: Request) -> Choose:
    def choose(*replacements: tuple[str, str], more: str = "") -> Selection:
        install_backend(folder, "acme", altered(*replacements, source=FAKE_BACKEND + more))
        return select(request_, "acme")

    return choose


def layer(request: Request, kind: LayerKind = SWA) -> LayerSpec:
    return LayerSpec(3, kind, request.model, num_heads=16)


def build(selection: Selection) -> binding.BoundLayer:
    return bind_layer(selection, layer(selection.request), "weights", "cpu")  # type: ignore[arg-type]


def test_subset_and_order_of_arguments(choose: Choose) -> None:
    bound = build(choose())
    state = ("layer", 3, "weights")
    assert bound.state == state
    assert bound.forward_mqa(*HOT).data == (state, 3, "q", "positions", True, False)
    assert bound.o_proj("attention", "positions") == (3, state, "attention", "positions")
    names = ("insert_kv", "compress", "index_logits", "index_topk")
    assert [getattr(bound, name) for name in names] == [None] * 4


def test_bound_call_equals_the_call_through_pluggy(choose: Choose) -> None:
    selection = choose()
    bound = build(selection)
    names = selection.backend.manager.hook.dsv4_forward_mqa.spec.argnames[2:]
    arguments = dict(zip(names, HOT, strict=True))
    through_pluggy = selection.backend.manager.hook.dsv4_forward_mqa(
        layer=bound.spec, state=bound.state, **arguments
    )
    assert bound.forward_mqa(*HOT).data == through_pluggy.data
    assert bound.forward_mqa(**arguments).data == through_pluggy.data


def test_own_operations(choose: Choose) -> None:
    owned = "{'insert_kv', 'compress', 'index_logits'}"
    bound = build(choose(("own_ops=frozenset()", f"own_ops=frozenset({owned})"), more=OWN_OPS))
    assert bound.insert_kv is not None
    assert bound.insert_kv("q", "kv", "positions", "caches", "step") == (
        *("insert_kv", 3, "q", "kv", "positions", "caches", "step"),
    )
    assert bound.compress is not None
    bound.compress("projected", "positions", "caches", "step", "index")
    assert bound.index_logits is not None
    assert bound.index_logits("q", "weights", "visible", "tokens", "width", "caches", "step", "kind") == (
        "index_logits",
        "q",
        "weights",
    )
    assert bound.index_topk is None


def test_an_operation_that_the_plan_does_not_name_stays_with_the_core(choose: Choose) -> None:
    assert build(choose(more=OWN_OPS)).insert_kv is None


def test_describe(choose: Choose) -> None:
    facts = {"backend": "acme", "distribution": "fake-acme", "version": "1.0", "variant": ""}
    assert build(choose(more=OWN_OPS)).describe() == {**facts, "kernel": "none", "layer": 3}


def test_describe_is_optional(choose: Choose) -> None:
    assert build(choose()).describe()["backend"] == "acme"


def test_kind(choose: Choose) -> None:
    selection = choose(more=OWN_OPS)
    kind = bind_kind(selection, C4A, "cpu")  # type: ignore[arg-type]
    assert kind.state == ("kind", "c4a", selection.request.limits)
    assert kind.plan is selection.plans["c4a"]
    kind.prepare_step("step")  # type: ignore[arg-type]
    assert selection.backend.plugin.seen == [("step", ("kind", "c4a"))]  # type: ignore[attr-defined]
    assert kind.plan_step("step") is None  # type: ignore[arg-type, func-returns-value]


def test_prepare_step_is_optional(choose: Choose) -> None:
    kind = bind_kind(choose(), C4A, "cpu")  # type: ignore[arg-type]
    assert kind.prepare_step("step") is None  # type: ignore[arg-type, func-returns-value]


def build_kind(selection: Selection) -> binding.BoundKind:
    return bind_kind(selection, C4A, "cpu")  # type: ignore[arg-type]


STATES = [
    (build, 'return ("layer", layer.index, weights)', "dsv4_init_layer_buffers"),
    (build_kind, 'return ("kind", kind.name, request.limits)', "dsv4_init_step_buffers"),
]


@pytest.mark.parametrize(("make", "statement", "hook"), STATES)
def test_no_state(choose: Choose, make: Callable[[Selection], object], statement: str, hook: str) -> None:
    selection = choose((statement, "pass"))
    with pytest.raises(PluginError) as caught:
        make(selection)
    assert str(caught.value) == (
        f"[broken] Backend 'acme' of fake-acme 1.0 returned None from {hook}, where a value is due. "
        "Repair or uninstall fake-acme."
    )


def test_a_hook_that_is_not_implemented(choose: Choose) -> None:
    with pytest.raises(PluginError, match="does not implement dsv4_insert_kv"):
        bind(choose().backend, "dsv4_insert_kv")


def test_a_kind_without_a_plan(choose: Choose) -> None:
    selection = choose()
    other = LayerKind(ratio=2, select="all", overlap=False)
    with pytest.raises(ValueError, match=r"^no plan for layers of kind c2a; planned are swa, c4a, c128a\.$"):
        bind_kind(selection, other, "cpu")  # type: ignore[arg-type]


class Tracer:
    """Counts calls and doubles what comes back."""

    hookimpl = pluggy.HookimplMarker("dsv4core")

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @hookimpl(wrapper=True)
    def dsv4_o_proj(self, attention: Any) -> Iterator[Any]:
        self.calls.append(attention)
        result = yield
        return (result, result)


def test_wrappers_take_the_slow_path_and_say_so_once(
    choose: Choose, caplog: pytest.LogCaptureFixture
) -> None:
    binding._say_slow.cache_clear()
    selection = choose()
    plain = build(selection).o_proj("attention", "positions")
    tracer = Tracer()
    selection.backend.manager.register(tracer)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert build(selection).o_proj("attention", "positions") == (plain, plain)
    assert tracer.calls == ["attention"] * 2
    assert caplog.messages == [
        "Hooks of backend acme go through pluggy, because wrappers are registered: slower."
    ]


def test_an_exception_on_the_hot_path_comes_through_with_a_note(choose: Choose) -> None:
    bound = build(choose(("return AttentionOutput(", "1 / 0\n    return AttentionOutput(")))
    with pytest.raises(ZeroDivisionError) as caught:
        bound.forward_mqa(*HOT)
    assert notes(caught.value) == ["in dsv4_forward_mqa of backend 'acme' (fake-acme 1.0), layer 3 (swa)"]
    assert str(caught.value) == "division by zero"
    assert caught.value.__cause__ is None


RAISING = [
    (build, 'return ("layer",', "layer 3 (swa)", "dsv4_init_layer_buffers"),
    (build_kind, 'return ("kind",', "layers of kind c4a", "dsv4_init_step_buffers"),
]


@pytest.mark.parametrize(("make", "statement", "place", "hook"), RAISING)
def test_an_exception_while_building_has_a_note(
    choose: Choose, make: Callable[[Selection], object], statement: str, place: str, hook: str
) -> None:
    selection = choose((statement, f"raise MemoryError\n    {statement}"))
    with pytest.raises(MemoryError) as caught:
        make(selection)
    assert notes(caught.value) == [f"in {hook} of backend 'acme' (fake-acme 1.0), {place}"]


def test_a_hook_cannot_end_the_process(choose: Choose) -> None:
    bound = build(choose(("return AttentionOutput(", "raise SystemExit(0)\n    return AttentionOutput(")))
    with pytest.raises(PluginError) as caught:
        bound.forward_mqa(*HOT)
    assert str(caught.value) == (
        "[broken] Backend 'acme' of fake-acme 1.0 left the process from dsv4_forward_mqa, layer 3 (swa). "
        "Repair or uninstall fake-acme."
    )


def test_an_exception_in_a_step_has_a_note(choose: Choose) -> None:
    raising = (
        "def dsv4_plan_step(kind_state, step):\n    return None",
        "def dsv4_plan_step(step):\n    raise KeyError(step)",
    )
    kind = build_kind(choose(raising))
    with pytest.raises(KeyError, match="a step") as caught:
        kind.plan_step("a step")  # type: ignore[arg-type]
    assert notes(caught.value) == ["in dsv4_plan_step of backend 'acme' (fake-acme 1.0), layers of kind c4a"]


def notes(error: BaseException) -> list[str]:
    """What was added to an exception; Python before 3.11 keeps it without showing it."""
    found: list[str] = getattr(error, "__notes__", [])
    return found


ATTEND, PROJECT = "dsv4_forward_mqa", "dsv4_o_proj"
NOTHING = [
    (
        "return AttentionOutput((",
        "AttentionOutput((",
        "dsv4_forward_mqa",
        lambda bound: bound.forward_mqa(*HOT),
    ),
    (
        "return (layer.index, state",
        "(layer.index, state",
        "dsv4_o_proj",
        lambda bound: bound.o_proj("a", "p"),
    ),
]


@pytest.mark.parametrize(("old", "new", "hook", "call"), NOTHING)
def test_none_where_a_value_is_due(
    choose: Choose, old: str, new: str, hook: str, call: Callable[[binding.BoundLayer], object]
) -> None:
    bound = build(choose((old, new)))
    with pytest.raises(PluginError) as caught:
        call(bound)
    assert str(caught.value) == (
        f"[broken] Backend 'acme' of fake-acme 1.0 returned None from {hook}, where a value is due. "
        "Repair or uninstall fake-acme."
    )


def test_a_bound_call_is_much_faster_than_pluggy(choose: Choose) -> None:
    selection = choose(("return AttentionOutput((state", "return ((state"))
    bound = build(selection)
    names = selection.backend.manager.hook.dsv4_forward_mqa.spec.argnames
    arguments = dict(zip(names, (bound.spec, bound.state, *HOT), strict=True))
    hook = selection.backend.manager.hook.dsv4_forward_mqa

    def fastest(call: Callable[[], object]) -> float:
        return min(timeit.repeat(call, number=2000, repeat=5))

    assert fastest(lambda: bound.forward_mqa(*HOT)) < fastest(lambda: hook(**arguments)) / 3
