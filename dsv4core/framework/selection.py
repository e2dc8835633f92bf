"""Chooses the backend of a request, once, and says why: a named one or an error, or the first that can."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from dsv4core.api import (
    BackendOptions,
    BackendUnavailable,
    ConfigError,
    KVCacheLayout,
    LayerPlan,
    Reason,
    Request,
)
from dsv4core.framework.checks import check_plan, check_request, core_reasons, sample_layers
from dsv4core.framework.discovery import KNOWN_BACKENDS, BackendRecord, absent_reason, discover
from dsv4core.framework.manager import (
    Backend,
    UnusableBackend,
    answer,
    broken,
    load_backend,
    one_line,
    strict,
)

logger = logging.getLogger(__name__)

Verdict = Literal["chosen", "rejected", "could-run", "not-reached"]

DEFAULT_ORDER: Mapping[str, Sequence[str]] = MappingProxyType({"cpu": ("reference",), "cuda": (), "rocm": ()})
"""Order of `auto` by architecture or platform. The reference is a hundred times too slow for a GPU's."""


@dataclass(frozen=True)
class Decision:
    """What selection found about one backend.

    Attributes:
        backend: Its name.
        verdict: `chosen`; `rejected` for `reasons`; `could-run` where a named backend could not and this one
            could; `not-reached` where `auto` had found one before.
        reasons: Why it was rejected, else empty.
    """

    backend: str
    verdict: Verdict
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Selection:
    """The chosen backend with everything that it decided about the request.

    Attributes:
        request: What was asked.
        backend: The loaded backend.
        options: Its options.
        layout: The cache formats that it reads and writes.
        plans: Its plan for layers of each kind, by the kind's name.
        decisions: What was found about each backend that was looked at.
        asked: What the user asked for: the backend's name, or `auto`.
    """

    request: Request
    backend: Backend
    options: BackendOptions
    layout: KVCacheLayout
    plans: Mapping[str, LayerPlan]
    decisions: tuple[Decision, ...] = ()
    asked: str = ""


class SelectionError(BackendUnavailable):
    """No backend was chosen; `decisions` has what was found about each."""

    def __init__(self, message: str, decisions: tuple[Decision, ...]) -> None:
        super().__init__(message)
        self.decisions = decisions


def select(
    request: Request,
    backend: str = "auto",
    options: BackendOptions | None = None,
    order: Mapping[str, Sequence[str]] = DEFAULT_ORDER,
    exclude: Iterable[str] = (),
) -> Selection:
    """Choose the backend that runs `request`.

    Args:
        request: What is asked.
        backend: A name: that backend or an error. `auto`: the first of the order that can run the request.
        options: Options of the named backend; None is its defaults.
        order: For `auto`: names by architecture, else by platform.
        exclude: For `auto`: names that are never chosen.

    Raises:
        SelectionError: The named backend cannot run the request, or none of the order can.
        ConfigError: The named backend does not accept an asked dtype, or the request or the arguments
            contradict themselves.
    """
    check_request(request)
    records = discover()
    if backend != "auto":
        return _select_named(request, backend, options, records)
    if options is not None:
        raise ConfigError("Options belong to a named backend, and backend=auto names none; name it.")
    excluded = frozenset(exclude)
    for name in sorted(excluded.difference(records, KNOWN_BACKENDS)):
        raise ConfigError(f"backend.exclude cannot be used: {absent_reason(name, records)}")
    names = order.get(request.arch, order.get(request.platform, ()))
    return _select_first(request, names, excluded, records)


def _select_named(
    request: Request, name: str, options: BackendOptions | None, records: Mapping[str, BackendRecord]
) -> Selection:
    result = _qualify(request, name, records, options)
    if isinstance(result, Selection):
        logger.debug("backend=%s runs, as asked: %s.", name, _source(result.backend))
        return replace(result, decisions=(Decision(name, "chosen"),), asked=name)
    others = [_judge(request, other, records) for other in records if other != name]
    able = ", ".join(other.backend for other in others if other.verdict == "could-run")
    message = f"backend={name} cannot run this request: {' '.join(map(str, result))}"
    message += f" What could run here, if you name it: {able or 'nothing that is installed'}."
    raise SelectionError(message, (Decision(name, "rejected", result), *others))


def _select_first(
    request: Request, order: Sequence[str], exclude: frozenset[str], records: Mapping[str, BackendRecord]
) -> Selection:
    chosen: Selection | None = None
    decisions = []
    for name in order:
        if chosen is not None:
            decisions.append(Decision(name, "not-reached"))
            continue
        result = (_EXCLUDED,) if name in exclude else _try(request, name, records)
        if isinstance(result, Selection):
            chosen = result
            decisions.append(Decision(name, "chosen"))
        else:
            decisions.append(Decision(name, "rejected", result))
    decisions += [
        Decision(name, "rejected", (record.problem or _not_in_order(name),))
        for name, record in records.items()
        if name not in order
    ]
    passed = [decision for decision in decisions if decision.verdict == "rejected"]
    if chosen is None:
        raise SelectionError(_nothing_fits(request, order, passed), tuple(decisions))
    logger.info(
        "backend=auto chose %s (%s); passed over: %s.",
        chosen.backend.name,
        _source(chosen.backend),
        "; ".join(_line(decision).rstrip(".") for decision in passed) or "none",
    )
    return replace(chosen, decisions=tuple(decisions), asked="auto")


def _judge(request: Request, name: str, records: Mapping[str, BackendRecord]) -> Decision:
    result = _try(request, name, records)
    if isinstance(result, Selection):
        return Decision(name, "could-run")
    return Decision(name, "rejected", result)


def _try(request: Request, name: str, records: Mapping[str, BackendRecord]) -> Selection | tuple[Reason, ...]:
    """As `_qualify` with default options, where nobody asked for this backend and its dtypes."""
    try:
        return _qualify(request, name, records)
    except ConfigError as error:
        return (Reason("kv-dtype", str(error)),)


def _qualify(
    request: Request,
    name: str,
    records: Mapping[str, BackendRecord],
    options: BackendOptions | None = None,
) -> Selection | tuple[Reason, ...]:
    """Everything that one backend decides about the request, or why it cannot run it."""
    if name not in records:
        return (absent_reason(name, records),)
    try:
        backend = load_backend(records[name])
        return _ask(backend, request, _options(backend, options))
    except ConfigError:
        raise
    except UnusableBackend as error:
        if strict() and error.reason.code != "disabled":
            raise
        return (error.reason,)
    except Exception as error:
        if strict():
            raise
        return (Reason("probe-error", f"Its checks raised {one_line(error)}.", "DSV4_STRICT=1 shows where."),)


def _options(backend: Backend, options: BackendOptions | None) -> BackendOptions:
    if options is None:
        return backend.info.options(name=backend.name)
    if not isinstance(options, backend.info.options):
        raise ConfigError(
            f"backend={backend.name} takes options of {backend.info.options.__name__}, "
            f"and was given {type(options).__name__}."
        )
    return options


def _ask(backend: Backend, request: Request, options: BackendOptions) -> Selection | tuple[Reason, ...]:
    reasons = core_reasons(backend.info, request)
    if any(reason.code == "platform" for reason in reasons):
        return reasons
    arguments = {"request": request, "options": options}
    own = answer(backend, "dsv4_unsupported_reasons", object, **arguments)
    if not (isinstance(own, Sequence) and all(isinstance(reason, Reason) for reason in own)):
        raise broken(backend, "returned something else than Reasons from dsv4_unsupported_reasons")
    if reasons or own:
        return (*reasons, *own)
    layout = answer(backend, "dsv4_resolve_kv_cache", KVCacheLayout, **arguments)
    plans = {}
    for layer in sample_layers(request):
        plan = answer(backend, "dsv4_plan_layer", LayerPlan, layer=layer, **arguments)
        check_plan(backend, request, layer, plan)
        plans[layer.kind.name] = plan
    return Selection(request, backend, options, layout, MappingProxyType(plans))


_EXCLUDED = Reason("disabled", "It is excluded.", "Take its name out of backend.exclude.")


def _not_in_order(name: str) -> Reason:
    return Reason("not-in-order", "It is installed, but auto does not try it.", f"Ask for backend={name}.")


def _nothing_fits(request: Request, order: Sequence[str], rejected: Sequence[Decision]) -> str:
    what = f"none of {', '.join(order)} can run this request" if order else "its order is empty"
    machine = f"{request.platform} {request.arch}".strip()
    facts = ("num_heads", "kv_cache_dtype", "index_dtype", "dtype", "tensor_parallel", "seam", "graph")
    lines = [
        f"backend=auto found no backend for {machine}: {what}.",
        "  request: " + ", ".join(f"{name}={getattr(request, name)}" for name in facts),
        *(f"  {_line(decision)}" for decision in rejected),
        f"Name a backend with backend=NAME, or list some in backend.order.{request.platform}; "
        "backend=reference computes everything, slowly.",
    ]
    return "\n".join(lines)


def _line(decision: Decision) -> str:
    return f"{decision.backend}: {' '.join(map(str, decision.reasons))}"


def _source(backend: Backend) -> str:
    return f"{backend.distribution} {backend.version}"
