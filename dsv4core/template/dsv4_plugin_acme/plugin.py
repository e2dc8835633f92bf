"""`backend=acme`: what it is, what it can run, what it plans. No torch here: listing backends stays fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsv4core.api import (
    API_VERSION,
    AttentionOutput,
    BackendInfo,
    BackendOptions,
    KVCacheLayout,
    LayerCaches,
    LayerKind,
    LayerPlan,
    LayerSpec,
    LayerWeights,
    Reason,
    Request,
    Step,
    hookimpl,
)
from dsv4core.kvcache import INDEX_DTYPES, KV_CACHE_DTYPES, cache_layout, resolve_dtype
from dsv4core.workspace import layer_bytes

if TYPE_CHECKING:
    import torch

    from dsv4_plugin_acme.layer import Layer, StepTables

KV_FORMATS = ("fp8_ds_mla", "bf16")  # also known: fp8_e4m3
INDEX_FORMATS = ("fp8",)


@dataclass
class Options(BackendOptions):
    """Options of the backend; each field is a key, `backend.<field>=VALUE`."""

    name: str = "acme"


@hookimpl
def dsv4_backend_info() -> BackendInfo:
    """What the backend is. Declare a capability when the kernels have it: the suite then checks it."""
    return BackendInfo(
        api=API_VERSION,
        options=Options,
        platforms=("cpu", "cuda", "rocm"),
        summary="acme's kernels",
        # A kernel library that it needs: requirements=(Requirement(MODULE, DISTRIBUTION, COMMAND),)
        capabilities=frozenset(
            {"kernel-seam", "lse", "defer-sink", "multi-token-decode", "strided-pages", "tensor-parallel"}
        ),
    )


@hookimpl
def dsv4_unsupported_reasons(request: Request) -> Sequence[Reason]:
    """Everything that the kernels cannot run, with what the user can do about it. Empty: it can run."""
    reasons = []
    if request.context_parallel > 1:
        text = f"context_parallel={request.context_parallel}, and every rank reads the whole context."
        reasons.append(Reason("parallel", text, "Set context_parallel=1."))
    return reasons


@hookimpl
def dsv4_resolve_kv_cache(request: Request) -> KVCacheLayout:
    """The formats that the asked dtypes mean, or an error that lists those that are accepted."""
    kv = resolve_dtype("kv_cache_dtype", request.kv_cache_dtype, KV_CACHE_DTYPES, KV_FORMATS, "acme")
    index = resolve_dtype("index_dtype", request.index_dtype, INDEX_DTYPES, INDEX_FORMATS, "acme")
    return cache_layout(request.model, kv, index)


@hookimpl
def dsv4_plan_layer(request: Request, layer: LayerSpec) -> LayerPlan:
    """Padding, dtypes and memory of one layer."""
    return LayerPlan(
        padded_q_heads=layer.num_heads,
        q_dtype=request.dtype,
        workspace_bytes=layer_bytes(layer, request.limits),
        variant="torch",
        consumes=frozenset({"wo_a", "wo_b"}),
    )


@hookimpl
def dsv4_init_layer_buffers(layer: LayerSpec, weights: LayerWeights) -> Layer:
    """Prepare a layer's weights, once."""
    from dsv4_plugin_acme.layer import Layer

    return Layer(layer, weights)


@hookimpl
def dsv4_init_step_buffers(request: Request, kind: LayerKind) -> StepTables:
    """What the layers of one kind share in a step."""
    from dsv4_plugin_acme.layer import StepTables

    return StepTables(kind, request.model.sliding_window)


@hookimpl
def dsv4_plan_step(kind_state: StepTables, step: Step) -> None:
    """Once a step and layer kind: index tables, tile schedules."""
    kind_state.plan(step)


@hookimpl
def dsv4_forward_mqa(
    state: Layer,
    q: torch.Tensor,
    caches: LayerCaches,
    selected: torch.Tensor | None,
    step: Step,
    kind_state: StepTables,
    want_lse: bool,
    apply_sink: bool,
) -> AttentionOutput:
    """Attend."""
    return AttentionOutput(*state.attend(q, caches, selected, kind_state, want_lse, apply_sink))


@hookimpl
def dsv4_o_proj(state: Layer, attention: AttentionOutput, positions: torch.Tensor) -> torch.Tensor:
    """Rotate back and project."""
    return state.project(attention.data, positions)


@hookimpl
def dsv4_describe(state: Layer) -> dict[str, Any]:
    """Facts for explain, bench and bug reports."""
    return {"kernel": "torch", "prepared_bytes": state.prepared_bytes}
