"""`backend=triton`: the core's own kernels, on any GPU that Triton compiles for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dsv4core.api import (
    API_VERSION,
    OWN_OPS,
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
    Reason,
    Request,
    Step,
    hookimpl,
)
from dsv4core.framework.kernels import TRITON, kernel_platforms, kernel_reasons
from dsv4core.kvcache import INDEX_DTYPES, KV_CACHE_DTYPES, cache_layout, resolve_dtype
from dsv4core.workspace import kernel_bytes

if TYPE_CHECKING:
    import torch

KV_FORMATS = ("fp8_ds_mla", "bf16", "fp8_e4m3")
INDEX_FORMATS = ("fp8", "bf16", "fp32")


@dataclass
class TritonOptions(BackendOptions):
    """Options of the Triton backend.

    Attributes:
        prefill: Whether queries of a prefill read rows in place, or those of a workspace in which all rows
            that they may see are decoded once. That takes a gigabyte at a million tokens.

    Raises:
        ConfigError: `prefill` is neither.
    """

    name: str = "triton"
    prefill: str = field(
        default="in_place",
        metadata={"help": "where prefills read cached rows", "choices": ("in_place", "gather")},
    )

    def __post_init__(self) -> None:
        """Refuse what would be taken for the default."""
        if self.prefill not in ("in_place", "gather"):
            raise ConfigError(f"backend.prefill={self.prefill} is not known; write in_place or gather.")


@hookimpl
def dsv4_backend_info() -> BackendInfo:
    """Describe the backend."""
    return BackendInfo(
        api=API_VERSION,
        options=TritonOptions,
        platforms=kernel_platforms(),
        summary="Triton kernels for any GPU, rows read in place",
        requirements=(TRITON,),
        capabilities=frozenset(
            {
                *("kernel-seam", "lse", "defer-sink", "multi-token-decode", "strided-pages"),
                *("tensor-parallel", "graph"),
            }
        ),
    )


@hookimpl
def dsv4_unsupported_reasons(request: Request, options: TritonOptions) -> Sequence[Reason]:
    """Contexts over ranks, and what the core's kernels cannot do."""
    return list(_reasons(request, options))


def _reasons(request: Request, options: TritonOptions) -> Iterator[Reason]:
    if request.context_parallel > 1:
        text = f"context_parallel={request.context_parallel}, and its kernels read the whole context."
        yield Reason("parallel", text, "Set context_parallel=1.")
    if options.prefill == "gather" and not request.host_lengths:
        text = "backend.prefill=gather plans workspaces by the lengths of a step, and the host has none."
        yield Reason("option", text, "Give Step.host_lengths, or set backend.prefill=in_place.")
    yield from kernel_reasons(request)


@hookimpl
def dsv4_resolve_kv_cache(request: Request) -> KVCacheLayout:
    """All formats but fp32; `auto` is the packed one."""
    kv = resolve_dtype("kv_cache_dtype", request.kv_cache_dtype, KV_CACHE_DTYPES, KV_FORMATS, "triton")
    index = resolve_dtype("index_dtype", request.index_dtype, INDEX_DTYPES, INDEX_FORMATS, "triton")
    return cache_layout(request.model, kv, index)


@hookimpl
def dsv4_plan_layer(request: Request, layer: LayerSpec, options: TritonOptions) -> LayerPlan:
    """Any number of heads without padding, and all operations its own."""
    return LayerPlan(
        padded_q_heads=layer.num_heads,
        q_dtype=request.dtype,
        workspace_bytes=kernel_bytes(layer, request.limits) + _gathered_bytes(layer, request, options),
        variant=f"triton (prefill={options.prefill})",
        own_ops=OWN_OPS,
        core_ops="triton",
        branches=True,
    )


def _gathered_bytes(layer: LayerSpec, request: Request, options: TritonOptions) -> int:
    """Workspaces of a layer's prefills, each up to the end of a page, and a step's table of the window's."""
    if options.prefill != "gather":
        return 0
    from dsv4core.step import gather_area

    window, limits = layer.model.sliding_window, request.limits
    area = gather_area(layer.kind, limits, window) + 2 * (16 * limits.max_requests + 64)
    value = 4 if request.dtype == "float32" else 2
    return area * layer.model.head_dim * value + 4 * limits.max_tokens * (window + 4)


@hookimpl
def dsv4_init_layer_buffers(layer: LayerSpec, weights: LayerWeights) -> Any:
    """Keep the output projection in FP8, the sinks and the compressors' vectors."""
    from dsv4core.backends.triton_layer import TritonLayer

    return TritonLayer(layer, weights)


@hookimpl
def dsv4_init_step_buffers(
    request: Request, kind: LayerKind, device: torch.device, options: TritonOptions
) -> Any:
    """A holder of the step's index tables, and of the division of its attention."""
    from dsv4core.backends.triton_layer import TritonStep

    return TritonStep(kind, request, dsv4_resolve_kv_cache(request), options.prefill == "gather", device)


@hookimpl
def dsv4_plan_step(kind_state: Any, step: Step) -> None:
    """Make the window's table; where the kind attends all entries, a table of each request's."""
    kind_state.plan(step)


@hookimpl
def dsv4_insert_kv(
    state: Any, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, caches: LayerCaches, step: Step
) -> torch.Tensor:
    """One kernel for queries and keys."""
    inserted: torch.Tensor = state.insert_kv(q, kv, positions, caches, step)
    return inserted


@hookimpl
def dsv4_compress(
    state: Any,
    projected: torch.Tensor,
    caches: LayerCaches,
    step: Step,
    target: Literal["compressed", "index"],
) -> None:
    """Entries, then states; in one kernel for decodes of C4A."""
    state.compress(projected, caches, step, target)


@hookimpl
def dsv4_index_logits(
    state: Any,
    q: torch.Tensor,
    weights: torch.Tensor,
    visible: torch.Tensor,
    tokens: slice,
    width: int,
    caches: LayerCaches,
    step: Step,
) -> torch.Tensor:
    """Keys are read in place."""
    scores: torch.Tensor = state.index_logits(q, weights, visible, tokens, width, caches, step)
    return scores


@hookimpl
def dsv4_index_topk(state: Any, logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Exact, in ascending order."""
    chosen: torch.Tensor = state.index_topk(logits, visible)
    return chosen


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
    """Attend over rows in place; a buffer of its own is returned."""
    output: AttentionOutput = state.forward_mqa(q, caches, selected, step, kind_state, want_lse, apply_sink)
    return output


@hookimpl
def dsv4_o_proj(state: Any, attention: AttentionOutput, positions: torch.Tensor) -> torch.Tensor:
    """Rotate back and project, with weights that stay FP8."""
    result: torch.Tensor = state.o_proj(attention.data, positions)
    return result


@hookimpl
def dsv4_describe(state: Any) -> dict[str, Any]:
    """Kernel, versions and prepared weights."""
    description: dict[str, Any] = state.describe()
    return description
