"""`backend=reference`: every operation's definition in plain torch, on any device, in every cache format."""

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

KV_FORMATS = ("fp8_ds_mla", "bf16", "fp8_e4m3", "fp32")
INDEX_FORMATS = ("fp8", "bf16", "fp32")


@dataclass
class ReferenceOptions(BackendOptions):
    """The reference has nothing to choose."""

    name: str = "reference"


@hookimpl
def dsv4_backend_info() -> BackendInfo:
    """Describe the backend."""
    return BackendInfo(
        api=API_VERSION,
        options=ReferenceOptions,
        platforms=("cpu", "cuda", "rocm"),
        summary="plain torch, the definition of every operation; slow on a GPU",
        capabilities=frozenset(
            {"kernel-seam", "lse", "defer-sink", "multi-token-decode", "strided-pages", "tensor-parallel"}
        ),
    )


@hookimpl
def dsv4_unsupported_reasons(request: Request) -> Sequence[Reason]:
    """It runs everything but a context that is spread over ranks."""
    if request.context_parallel > 1:
        text = f"context_parallel={request.context_parallel}, and the reference reads the whole context."
        return [Reason("parallel", text, "Set context_parallel=1.")]
    return []


@hookimpl
def dsv4_resolve_kv_cache(request: Request) -> KVCacheLayout:
    """All formats; `auto` is the packed one."""
    kv = resolve_dtype("kv_cache_dtype", request.kv_cache_dtype, KV_CACHE_DTYPES, KV_FORMATS, "reference")
    index = resolve_dtype("index_dtype", request.index_dtype, INDEX_DTYPES, INDEX_FORMATS, "reference")
    return cache_layout(request.model, kv, index)


@hookimpl
def dsv4_plan_layer(request: Request, layer: LayerSpec) -> LayerPlan:
    """No padding, q in the activation dtype."""
    return LayerPlan(
        padded_q_heads=layer.num_heads,
        q_dtype=request.dtype,
        workspace_bytes=layer_bytes(layer, request.limits),
        variant="torch",
        consumes=frozenset({"wo_a", "wo_b"}),
    )


@hookimpl
def dsv4_init_layer_buffers(layer: LayerSpec, weights: LayerWeights) -> Any:
    """Dequantise the output projection, keep the sinks."""
    from dsv4core.backends.reference_layer import ReferenceLayer

    return ReferenceLayer(layer, weights)


@hookimpl
def dsv4_init_step_buffers(request: Request, kind: LayerKind) -> Any:
    """An empty holder of the step's index tables."""
    from dsv4core.backends.reference_layer import ReferenceStep

    return ReferenceStep(kind, request.model.sliding_window)


@hookimpl
def dsv4_plan_step(kind_state: Any, step: Step) -> None:
    """Make the window's table, and that of all entries where the kind attends all."""
    kind_state.plan(step)


@hookimpl
def dsv4_forward_mqa(
    state: Any,
    q: torch.Tensor,
    caches: LayerCaches,
    selected: torch.Tensor | None,
    step: Step,
    kind_state: Any,
    want_lse: bool,
    apply_sink: bool,
) -> AttentionOutput:
    """Attend over the decoded rows; a buffer of its own is returned."""
    output: AttentionOutput = state.forward_mqa(q, caches, selected, step, kind_state, want_lse, apply_sink)
    return output


@hookimpl
def dsv4_o_proj(state: Any, attention: AttentionOutput, positions: torch.Tensor) -> torch.Tensor:
    """Rotate back and project."""
    result: torch.Tensor = state.o_proj(attention.data, positions)
    return result


@hookimpl
def dsv4_describe(state: Any) -> dict[str, Any]:
    """Kernel and torch version."""
    description: dict[str, Any] = state.describe()
    return description
