"""`backend=acme`: what it is, what it can run, what it plans. No torch here: listing backends stays fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsv4core.api import (
    API_VERSION,
    AttentionOutput,
    BackendInfo,
    BackendOptions,
    ConfigError,
    KVCacheLayout,
    LayerCaches,
    LayerKind,
    LayerPlan,
    LayerSpec,
    LayerWeights,
    OutputSpec,
    Reason,
    Request,
    Step,
    hookimpl,
)
from dsv4core.kvcache import INDEX_DTYPES, KV_CACHE_DTYPES, cache_layout, resolve_dtype
from dsv4core.workspace import o_proj_bytes

if TYPE_CHECKING:
    import torch

    from acme_backend.layer import Layer, StepTables

KV_FORMATS = ("fp8_ds_mla", "bf16", "fp8_e4m3")
INDEX_FORMATS = ("fp8",)
HEAD_TILE = 8
"""The kernel works on this many heads at a time."""


@dataclass
class Options(BackendOptions):
    """Options of the backend.

    Raises:
        ConfigError: The tile is none that the kernel has.
    """

    name: str = "acme"
    tile: int = field(default=64, metadata={"help": "keys that the kernel reads at a time"})

    def __post_init__(self) -> None:
        if self.tile < 1:
            raise ConfigError(f"backend.tile={self.tile} reads no keys; give a positive number.")


@hookimpl
def dsv4_backend_info() -> BackendInfo:
    """What the backend is."""
    return BackendInfo(
        api=API_VERSION,
        options=Options,
        platforms=("cpu",),
        summary="an example: attention in tiles, on a CPU",
        capabilities=frozenset(
            {
                *("kernel-seam", "lse", "defer-sink", "multi-token-decode", "strided-pages"),
                *("tensor-parallel", "private-output", "deterministic"),
            }
        ),
    )


@hookimpl
def dsv4_unsupported_reasons(request: Request) -> Sequence[Reason]:
    """The kernel reads whole contexts, with page numbers that it gets by shifting."""
    reasons = []
    if request.context_parallel > 1:
        text = f"context_parallel={request.context_parallel}, and every rank reads the whole context."
        reasons.append(Reason("parallel", text, "Set context_parallel=1."))
    window = request.page_sizes.window
    if window & (window - 1):
        text = f"Pages of {window} window rows, and the kernel takes powers of two."
        reasons.append(Reason("block-size", text, "Use 64."))
    return reasons


@hookimpl
def dsv4_resolve_kv_cache(request: Request) -> KVCacheLayout:
    """The formats that the asked dtypes mean."""
    kv = resolve_dtype("kv_cache_dtype", request.kv_cache_dtype, KV_CACHE_DTYPES, KV_FORMATS, "acme")
    index = resolve_dtype("index_dtype", request.index_dtype, INDEX_DTYPES, INDEX_FORMATS, "acme")
    return cache_layout(request.model, kv, index)


@hookimpl
def dsv4_plan_layer(request: Request, layer: LayerSpec, options: Options) -> LayerPlan:
    """Heads are padded to the kernel's tile; the output stays the backend's where the host lets it."""
    heads = -(-layer.num_heads // HEAD_TILE) * HEAD_TILE
    output = OutputSpec("private") if request.private_output else OutputSpec(padded=True)
    # One tile of keys as bytes and fp32, its scores and weights, and the running output.
    floats = options.tile * (2 * layer.model.head_dim + 2 * heads) + 2 * heads * layer.model.head_dim
    return LayerPlan(
        padded_q_heads=heads,
        q_dtype=request.dtype,
        output=output,
        workspace_bytes=max(4 * floats, o_proj_bytes(layer, request.limits.max_tokens)),
        variant=f"tile_{options.tile}",
        consumes=frozenset({"wo_a", "wo_b"}),
    )


@hookimpl
def dsv4_init_layer_buffers(
    layer: LayerSpec, plan: LayerPlan, weights: LayerWeights, options: Options
) -> Layer:
    """Prepare a layer's weights, once."""
    from acme_backend.layer import Layer

    return Layer(layer, plan, weights, options.tile)


@hookimpl
def dsv4_init_step_buffers(request: Request, kind: LayerKind) -> StepTables:
    """What the layers of one kind share in a step."""
    from acme_backend.layer import StepTables

    return StepTables(kind, request.model.sliding_window)


@hookimpl
def dsv4_plan_step(kind_state: StepTables, step: Step) -> None:
    """The tables of a step."""
    kind_state.plan(step)


@hookimpl
def dsv4_forward_mqa(
    state: Layer,
    q: torch.Tensor,
    caches: LayerCaches,
    selected: torch.Tensor | None,
    positions: torch.Tensor,
    kind_state: StepTables,
    want_lse: bool,
    apply_sink: bool,
) -> AttentionOutput:
    """Attend."""
    return state.attend(q, caches, selected, positions, kind_state, want_lse, apply_sink)


@hookimpl
def dsv4_o_proj(state: Layer, attention: AttentionOutput, positions: torch.Tensor) -> torch.Tensor:
    """Project, rotating back first where that is still to be done."""
    return state.project(attention.data, positions)


@hookimpl
def dsv4_describe(state: Layer) -> dict[str, Any]:
    """Facts for explain, bench and bug reports."""
    return {"kernel": "tiles", "tile": state.tile, "prepared_bytes": state.prepared_bytes}
