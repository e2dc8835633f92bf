"""Binds hooks to layers once: the hot path makes plain calls of 0.1 µs, where pluggy takes 2.5 to 8."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from dsv4core.api import AttentionOutput, LayerKind, LayerPlan, LayerSpec, LayerWeights, Step
from dsv4core.framework.manager import Backend, answer, broken
from dsv4core.framework.selection import Selection
from dsv4core.framework.wording import add_note

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class BoundLayer:
    """A layer's hooks with layer and state filled in. The remaining arguments keep the order of the contract.

    Attributes:
        backend: The backend that all hooks come from.
        spec: The layer.
        plan: The backend's plan for layers of its kind.
        state: What `dsv4_init_layer_buffers` returned.
        forward_mqa: `(q, caches, selected, positions, step, kind_state, out, want_lse, apply_sink)`.
        o_proj: `(attention, positions)` to this rank's partial sum, `[tokens, hidden_size]`.
        insert_kv: `(q, kv, positions, caches, step)` to q, or None where the plan leaves it to the core.
        compress: `(projected, positions, caches, step, target)`, or None likewise.
        index_logits: `(q, weights, visible, tokens, width, caches, step, kind_state)` to logits, or None
            likewise.
        index_topk: `(logits, visible, step)` to the chosen entries, or None likewise.
    """

    backend: Backend
    spec: LayerSpec
    plan: LayerPlan
    state: Any = field(repr=False)
    forward_mqa: Callable[..., AttentionOutput] = field(repr=False)
    o_proj: Callable[..., torch.Tensor] = field(repr=False)
    insert_kv: Callable[..., torch.Tensor] | None = field(repr=False)
    compress: Callable[..., None] | None = field(repr=False)
    index_logits: Callable[..., torch.Tensor] | None = field(repr=False)
    index_topk: Callable[..., torch.Tensor] | None = field(repr=False)

    def describe(self) -> dict[str, Any]:
        """Backend, version and kernel variant, and what the backend adds about the layer's state."""
        facts = {
            "backend": self.backend.name,
            "distribution": self.backend.record.distribution,
            "version": self.backend.record.version,
            "variant": self.plan.variant,
        }
        if self.backend.implements("dsv4_describe"):
            facts |= answer(self.backend, "dsv4_describe", dict, state=self.state)
        return facts


@dataclass(frozen=True, slots=True, eq=False)
class BoundKind:
    """The hooks that run once per step for all layers of one kind, with their shared state filled in.

    Attributes:
        kind: The layer kind.
        plan: The backend's plan for it.
        state: What `dsv4_init_step_buffers` returned; the `kind_state` of `forward_mqa`.
        prepare_step: `(step)`: host work before every run or replay; does nothing if not implemented.
        plan_step: `(step)`: device work, captured with the step.
    """

    kind: LayerKind
    plan: LayerPlan
    state: Any = field(repr=False)
    prepare_step: Callable[[Step], None] = field(repr=False)
    plan_step: Callable[[Step], None] = field(repr=False)


def bind(backend: Backend, hook: str, *fixed: object, place: str = "") -> Callable[..., Any]:
    """A plain callable for one hook, its first arguments filled in.

    The result takes the remaining arguments in the order of the contract, whatever subset or order the
    backend's function takes. An exception goes through it untouched, with a note that names the backend
    and `place`; None where a value is due is an error, and so is an exit. Where wrappers are registered (by
    `backend.manager.register`, before a layer is bound) it goes through pluggy.

    Args:
        backend: The backend.
        hook: The hook's name.
        fixed: Values of the contract's first arguments.
        place: What it is bound for, such as `layer 3 (c4a)`.

    Raises:
        PluginError: The backend does not implement the hook.
    """
    own = backend.implementation(hook)
    if own is None:
        raise broken(backend.record, f"does not implement {hook}")
    caller = getattr(backend.manager.hook, hook)
    names = caller.spec.argnames
    function, arguments = own.function, ", ".join(own.argnames)
    if len(caller.get_hookimpls()) > 1:
        _say_slow(backend.name)
        function, arguments = caller, ", ".join(f"{name}={name}" for name in names)
    held, rest = ", ".join(names[: len(fixed)]), ", ".join(names[len(fixed) :])
    template = _WITHOUT_RESULT if caller.spec.function.__annotations__["return"] == "None" else _WITH_RESULT
    scope: dict[str, Any] = {}
    source = template.format(held=held, rest=rest, arguments=arguments)
    exec(compile(source, f"<dsv4core's call of {hook}>", "exec"), scope)
    origin = f"in {hook} of backend {backend.name!r} ({backend.record.source})"
    note = partial(add_note, f"{origin}, {place}" if place else origin)
    nothing = partial(broken, backend.record, f"returned None from {hook}, where a value is due")
    left = partial(broken, backend.record, f"left the process from {hook}, {place}".rstrip(", "))
    bound: Callable[..., Any] = scope["make"](function, note, nothing, left, *fixed)
    return bound


# One call of Python and nothing else: `partial` and `**kwargs` cost more, a quiet `try` costs nothing.
_WITH_RESULT = """
def make(function, note, nothing, left, {held}):
    def bound({rest}):
        try:
            result = function({arguments})
        except SystemExit as error:
            raise left() from error
        except BaseException as error:
            note(error)
            raise
        if result is None:
            raise nothing()
        return result
    return bound
"""
_WITHOUT_RESULT = """
def make(function, note, nothing, left, {held}):
    def bound({rest}):
        try:
            function({arguments})
        except SystemExit as error:
            raise left() from error
        except BaseException as error:
            note(error)
            raise
    return bound
"""


def bind_layer(
    selection: Selection, spec: LayerSpec, weights: LayerWeights, device: torch.device
) -> BoundLayer:
    """Build one layer's state and bind its hooks.

    Args:
        selection: The chosen backend and its plans.
        spec: The layer.
        weights: Its weights, this rank's shard.
        device: Where its state goes.

    Raises:
        PluginError: The backend returned no state.
        ValueError: The selection has no plan for the layer's kind.
    """
    backend, plan = selection.backend, _plan_of(selection, spec.kind)
    place = f"layer {spec.index} ({spec.kind.name})"
    make = bind(backend, "dsv4_init_layer_buffers", place=place)
    state = make(spec, plan, weights, device, selection.options)

    def bind_here(hook: str) -> Callable[..., Any]:
        return bind(backend, hook, spec, state, place=place)

    own = {name: bind_here(f"dsv4_{name}") for name in plan.own_ops}
    return BoundLayer(
        backend=backend,
        spec=spec,
        plan=plan,
        state=state,
        forward_mqa=bind_here("dsv4_forward_mqa"),
        o_proj=bind_here("dsv4_o_proj"),
        insert_kv=own.get("insert_kv"),
        compress=own.get("compress"),
        index_logits=own.get("index_logits"),
        index_topk=own.get("index_topk"),
    )


def bind_kind(selection: Selection, kind: LayerKind, device: torch.device) -> BoundKind:
    """Build the buffers that layers of one kind share within a step, and bind the hooks that fill them.

    Args:
        selection: The chosen backend and its plans.
        kind: The layer kind.
        device: Where its buffers go; they hold a step of the request's limits.

    Raises:
        PluginError: The backend returned no state.
        ValueError: The selection has no plan for this kind.
    """
    backend, plan = selection.backend, _plan_of(selection, kind)
    place = f"layers of kind {kind.name}"
    make = bind(backend, "dsv4_init_step_buffers", place=place)
    state = make(selection.request, kind, plan, device, selection.options)
    prepares = plan.prepares and backend.implements("dsv4_prepare_step")
    return BoundKind(
        kind=kind,
        plan=plan,
        state=state,
        prepare_step=bind(backend, "dsv4_prepare_step", state, place=place) if prepares else _nothing,
        plan_step=bind(backend, "dsv4_plan_step", state, place=place),
    )


def _nothing(step: Step) -> None:
    """Stand for a `dsv4_prepare_step` that a backend does not implement."""


def _plan_of(selection: Selection, kind: LayerKind) -> LayerPlan:
    plan = selection.plans.get(kind.name)
    if plan is None:
        raise ValueError(f"no plan for layers of kind {kind.name}; planned are {', '.join(selection.plans)}.")
    return plan


@cache
def _say_slow(name: str) -> None:
    logger.warning("Hooks of backend %s go through pluggy, because wrappers are registered: slower.", name)
