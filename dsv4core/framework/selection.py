"""Chooses the backend of a request, once, and says why: a named one or an error, or the first that can."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from dsv4core.api import (
    BackendOptions,
    BackendUnavailable,
    ConfigError,
    Decision,
    KVCacheLayout,
    LayerPlan,
    PluginError,
    Reason,
    Request,
)
from dsv4core.framework.checks import check_plan, check_request, core_reasons, plan_reasons, sample_layers
from dsv4core.framework.discovery import BackendRecord, discover
from dsv4core.framework.known import absent_reason
from dsv4core.framework.manager import (
    DEFECTS,
    Backend,
    answer,
    broken,
    isolated,
    load_backend,
    tolerable,
)
from dsv4core.framework.order import DEFAULT_ORDER, check_order, order_of
from dsv4core.framework.watchdog import watch

logger = logging.getLogger(__name__)


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

    def summary(self) -> dict[str, Any]:
        """What was chosen as plain data, to be logged, compared between ranks, or kept with a measurement."""
        return {
            "backend": self.backend.name,
            "distribution": self.backend.record.distribution,
            "version": self.backend.record.version,
            "options": {name: value for name, value in vars(self.options).items() if name != "name"},
            "kv_cache": {name: kept.name for name, kept in vars(self.layout).items()},
            "variants": {kind: plan.variant for kind, plan in self.plans.items()},
        }


def select(
    request: Request,
    backend: str = "auto",
    options: BackendOptions | None = None,
    order: Mapping[str, Sequence[str]] = MappingProxyType({}),
    disable: Iterable[str] = (),
) -> Selection:
    """Choose the backend that runs `request`.

    Args:
        request: What is asked.
        backend: A name: that backend or an error. `auto`: the first of the order that can run the request.
        options: Options of the named backend; None is its defaults.
        order: For `auto`: names by architecture or platform; `DEFAULT_ORDER` for machines that it has not.
        disable: Backends and distributions that are not loaded, besides those of `DSV4_DISABLE`.

    Raises:
        BackendUnavailable: The named backend cannot run the request, or none of the order can.
        ConfigError: The request or the arguments contradict themselves, or the order names no machine.
        PluginError: With `DSV4_STRICT=1`: a backend that was looked at is broken.
    """
    check_request(request)
    if isinstance(disable, str):
        raise ConfigError(f"disable={disable!r} is no list of backends; write [{disable!r}].")
    records = discover(disable)
    if backend != "auto":
        return _select_named(request, backend, options, records)
    if options is not None:
        raise ConfigError("Options belong to a named backend, and backend=auto names none; name it.")
    check_order(order)
    return _select_first(request, order_of(request, order, DEFAULT_ORDER), records)


def _select_named(
    request: Request, name: str, options: BackendOptions | None, records: Mapping[str, BackendRecord]
) -> Selection:
    result = _qualify(request, name, records, options)
    if isinstance(result, Selection):
        logger.debug("backend=%s runs, as asked: %s.", name, result.backend.record.source)
        return replace(result, decisions=(Decision(name, "chosen"),), asked=name)
    others = [_judge(request, other, records) for other in records if other != name]
    able = ", ".join(other.backend for other in others if other.verdict == "could-run")
    message = f"backend={name} cannot run this request: {' '.join(map(str, result))}"
    message += f" What could run here, if you name it: {able or 'nothing that is installed'}."
    raise BackendUnavailable(message, (Decision(name, "rejected", result), *others))


def _select_first(request: Request, order: Sequence[str], records: Mapping[str, BackendRecord]) -> Selection:
    chosen: Selection | None = None
    decisions = []
    for name in dict.fromkeys(order):
        if chosen is not None:
            decisions.append(Decision(name, "not-reached"))
            continue
        result = _qualify(request, name, records)
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
        raise BackendUnavailable(_nothing_fits(request, order, passed), tuple(decisions))
    tried = (decision for decision in passed if decision.backend in order)
    defect = any(reason.code in DEFECTS for decision in tried for reason in decision.reasons)
    logger.log(
        logging.WARNING if defect else logging.INFO,
        "backend=auto chose %s (%s); passed over: %s.",
        chosen.backend.name,
        chosen.backend.record.source,
        "; ".join(_line(decision).rstrip(".") for decision in passed) or "none",
    )
    return replace(chosen, decisions=tuple(decisions), asked="auto")


def _judge(request: Request, name: str, records: Mapping[str, BackendRecord]) -> Decision:
    result = _qualify(request, name, records)
    if isinstance(result, Selection):
        return Decision(name, "could-run")
    return Decision(name, "rejected", result)


def _qualify(
    request: Request,
    name: str,
    records: Mapping[str, BackendRecord],
    options: BackendOptions | None = None,
) -> Selection | tuple[Reason, ...]:
    """Everything that one backend decides about the request, or why it cannot run it."""
    if name not in records:
        return (absent_reason(name, records),)
    record = records[name]
    try:
        backend = load_backend(record)
        own = _options(backend, options)
        with (
            watch(f"Asking backend {name!r} of {record.source} what it can run", name),
            isolated(record, "probe-error", "Its checks raised"),
        ):
            return _ask(backend, request, own)
    except PluginError as error:
        if not tolerable(error):
            raise
        return (error.reason,)


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
    # Without its packages a probe of the host could only raise, and hide the reason why.
    blind = any(reason.code.startswith("package-") for reason in reasons)
    probed = replace(request, probe="static") if blind else request
    with _refusal("option"):
        own = answer(backend, "dsv4_unsupported_reasons", object, request=probed, options=options)
    if not (isinstance(own, (list, tuple)) and all(isinstance(reason, Reason) for reason in own)):
        raise broken(backend.record, "returned something else than Reasons from dsv4_unsupported_reasons")
    arguments = {"request": request, "options": options}
    # What a package would not help is said before it is installed.
    if blind and all(reason.code.startswith("package-") for reason in own):
        own = [*own, *_refused_kv_cache(backend, **arguments)]
    if reasons or own:
        return (*reasons, *own)
    with _refusal("kv-dtype"):
        layout = answer(backend, "dsv4_resolve_kv_cache", KVCacheLayout, **arguments)
    plans = {}
    for layer in sample_layers(request):
        with _refusal("option"):
            plan = answer(backend, "dsv4_plan_layer", LayerPlan, layer=layer, **arguments)
        check_plan(backend, request, layer, plan)
        plans[layer.kind.name] = plan
    if lacking := plan_reasons(request, plans.values()):
        return lacking
    return Selection(request, backend, options, layout, MappingProxyType(plans))


def _refused_kv_cache(backend: Backend, **arguments: Any) -> list[Reason]:
    try:
        answer(backend, "dsv4_resolve_kv_cache", KVCacheLayout, **arguments)
    except ConfigError as error:
        return [Reason("kv-dtype", str(error))]
    return []


@contextmanager
def _refusal(code: str) -> Iterator[None]:
    """A backend may refuse what the user wrote with a `ConfigError`: its text is then the reason."""
    try:
        yield
    except ConfigError as error:
        raise PluginError(Reason(code, str(error))) from error


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
