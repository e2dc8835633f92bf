"""What the core checks for every backend alike: platform, capabilities, and the plans that it returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from dsv4core.api import CAPABILITIES, BackendInfo, ConfigError, LayerPlan, LayerSpec, Reason, Request
from dsv4core.framework.kernels import TRITON, kernel_reasons
from dsv4core.framework.manager import Backend, broken
from dsv4core.framework.requirements import requirement_reasons
from dsv4core.model.shapes import layer_spec


def check_request(request: Request) -> None:
    """Check what no backend can judge.

    Raises:
        ConfigError: The heads cannot be shared by the ranks, `num_heads` is not one rank's share, or a
            context page would cut an entry in two.
    """
    share = layer_spec(request.model, 0, tp_size=request.tensor_parallel).num_heads
    if request.num_heads != share:
        raise ConfigError(
            f"num_heads={request.num_heads} is asked for, but each of {request.tensor_parallel} ranks has "
            f"{share} of the model's {request.model.num_attention_heads} heads; give that number."
        )
    for kind in request.model.kinds:
        request.page_sizes.check_kind(kind)


def core_reasons(info: BackendInfo, request: Request) -> tuple[Reason, ...]:
    """Reasons that follow from what a backend declares; a wrong platform hides all others."""
    if request.platform not in info.platforms:
        served = ", ".join(info.platforms)
        return (
            Reason("platform", f"It has kernels for {served}, and the request is for {request.platform}."),
        )
    return (
        *requirement_reasons(info.requirements),
        *_capability_reasons(info.on(request.arch), request),
        *_model_reasons(request),
    )


def plan_reasons(request: Request, plans: Iterable[LayerPlan]) -> tuple[Reason, ...]:
    """What the core's kernels need, where a plan asks for them."""
    if all(plan.core_ops == "torch" for plan in plans):
        return ()
    return (*requirement_reasons([TRITON]), *kernel_reasons(request))


def check_plan(backend: Backend, request: Request, layer: LayerSpec, plan: LayerPlan) -> None:
    """Check a plan against its request.

    Raises:
        PluginError: The plan contradicts the request or names an operation that has no hook.
    """
    record = backend.record
    if plan.padded_q_heads < layer.num_heads:
        raise broken(
            record, f"plans {plan.padded_q_heads} query heads for a layer that has {layer.num_heads} of them"
        )
    if plan.output.format == "private" and "private-output" not in backend.info.on(request.arch).capabilities:
        raise broken(record, "plans a private attention output, and does not declare 'private-output'")
    if plan.output.format == "private" and not request.private_output:
        raise broken(record, "plans a private attention output, which the request forbids")
    for operation in sorted(plan.own_ops):
        if not backend.implements(f"dsv4_{operation}"):
            raise broken(record, f"plans to do {operation} itself, but does not implement dsv4_{operation}")


def sample_layers(request: Request) -> Iterator[LayerSpec]:
    """One layer of each kind of the request's model, as rank 0 has it."""
    for kind in request.model.kinds:
        index = request.model.layer_kinds.index(kind)
        yield layer_spec(request.model, index, tp_size=request.tensor_parallel)


def _capability_reasons(info: BackendInfo, request: Request) -> Iterator[Reason]:
    merged = request.context_parallel > 1
    needs = {
        "kernel-seam": request.seam == "kernel",
        "lse": merged,
        "defer-sink": merged,
        "multi-token-decode": request.decode_query_len > 1,
        "graph": request.graph,
        "deterministic": request.deterministic,
        "strided-pages": request.strided_pages,
        "tensor-parallel": request.tensor_parallel > 1,
    }
    for name, needed in needs.items():
        if needed and name not in info.capabilities:
            text = f"The request needs {name!r} ({CAPABILITIES[name]}), which it does not declare."
            yield Reason("capability", text)
    if "needs-host-lengths" in info.capabilities and not request.host_lengths:
        text = "It needs the lengths of a step on the host, and the host has none."
        yield Reason("capability", text, "Give Step.host_lengths.")


def _model_reasons(request: Request) -> Iterator[Reason]:
    for name, count in Counter(kind.name for kind in request.model.kinds).items():
        if count > 1:
            yield Reason(
                "model", f"The model has {count} kinds of layers named {name}, and plans go by name."
            )
