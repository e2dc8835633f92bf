"""`backend=flashmla`: what it is, what it can run, what it plans. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsv4_plugin_flashmla import library
from dsv4core import libraries
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

if TYPE_CHECKING:
    import torch

    from dsv4_plugin_flashmla.layer import Layer, SharedStep

KV_FORMATS = ("fp8_ds_mla",)
INDEX_FORMATS = ("fp8", "bf16", "fp32")
ARCHITECTURES = ("sm_90", "sm_100")
HEADS = (64, 128)
"""Query heads that the kernels have; fewer are padded."""
INDEX_HEADS, INDEX_WIDTHS, INDEX_PAGE = (32, 64), (32, 64, 128), 64
"""Heads, widths of a key and keys a page that DeepGEMM's scores are compiled for."""
MOST_ROWS = 1024
"""Query tokens of one call: sums of parts take 2 KB a head each."""
PARTS = 160
"""Most parts that a kernel divides a call's rows into besides."""
GATHERING = ("sm_90", "sm_100")
"""Where `backend.prefill=auto` gathers: a query of 640 rows takes 158 ns on an H200, and 319 in place. On
sm_100 nothing is measured, and FlashMLA's kernel for prefills is taken to be ahead, too."""


@dataclass
class FlashMLAOptions(BackendOptions):
    """Options of the backend.

    Attributes:
        prefill: Whether queries of a prefill attend a workspace of decoded rows, with FlashMLA's kernel for
            prefills, or packed rows in place, with that for decodes. `auto` is the faster one of the
            architecture, and `in_place` where a host has no lengths.

    Raises:
        ConfigError: `prefill` is none of them.
    """

    name: str = "flashmla"
    prefill: str = field(
        default="auto",
        metadata={"help": "where prefills read cached rows", "choices": ("auto", "gather", "in_place")},
    )

    def __post_init__(self) -> None:
        """Refuse what would be taken for the default."""
        if self.prefill not in ("auto", "gather", "in_place"):
            raise ConfigError(f"backend.prefill={self.prefill} is not known; write auto, gather or in_place.")

    def gathers(self, request: Request) -> bool:
        """Whether rows of prefills are gathered."""
        if self.prefill == "auto":
            return request.host_lengths and request.arch in (*GATHERING, "")
        return self.prefill == "gather"


@hookimpl
def dsv4_backend_info() -> BackendInfo:
    """Describe the backend."""
    return BackendInfo(
        api=API_VERSION,
        options=FlashMLAOptions,
        platforms=("cuda",),
        summary="FlashMLA and DeepGEMM kernels for sm_90 and sm_100",
        requirements=(library.requirement(),),
        capabilities=frozenset(
            {
                *("kernel-seam", "lse", "defer-sink", "multi-token-decode", "strided-pages"),
                *("tensor-parallel", "graph"),
            }
        ),
    )


@hookimpl
def dsv4_unsupported_reasons(request: Request, options: FlashMLAOptions) -> Sequence[Reason]:
    """Other architectures, heads, activations, contexts over ranks, a library that does not fit."""
    return list(_reasons(request, options))


def _reasons(request: Request, options: FlashMLAOptions) -> Iterator[Reason]:
    if request.platform == "cuda" and request.arch not in ARCHITECTURES:
        text = f"It is made for {' and '.join(ARCHITECTURES)}, and this is {request.arch}."
        yield Reason("arch", text, "Use backend=triton.")
    yield from library.flash_mla_reasons(request.probe)
    yield from libraries.deep_gemm_reasons()
    if request.num_heads > HEADS[-1]:
        text = f"{request.num_heads} query heads a rank, and FlashMLA has kernels of {HEADS[-1]} at most."
        yield Reason("q-heads", text, "Raise tensor_parallel.")
    if request.dtype != "bfloat16":
        text = f"Activations are {request.dtype}, and FlashMLA's queries and outputs are bfloat16."
        yield Reason("model", text, "Set dtype=bfloat16.")
    if request.context_parallel > 1:
        text = f"context_parallel={request.context_parallel}, and a rank's kernels read the whole context."
        yield Reason("parallel", text, "Set context_parallel=1.")
    if options.prefill == "gather" and not request.host_lengths:
        text = "backend.prefill=gather plans workspaces by the lengths of a step, and the host has none."
        yield Reason("option", text, "Give Step.host_lengths, or set backend.prefill=auto.")


@hookimpl
def dsv4_resolve_kv_cache(request: Request) -> KVCacheLayout:
    """Packed rows only."""
    kv = resolve_dtype("kv_cache_dtype", request.kv_cache_dtype, KV_CACHE_DTYPES, KV_FORMATS, "flashmla")
    index = resolve_dtype("index_dtype", request.index_dtype, INDEX_DTYPES, INDEX_FORMATS, "flashmla")
    return cache_layout(request.model, kv, index)


@hookimpl
def dsv4_plan_layer(request: Request, layer: LayerSpec, options: FlashMLAOptions) -> LayerPlan:
    """Heads of the next kernel; the core's kernels for all that is not attention."""
    heads, gathers = padded_heads(layer.num_heads), options.gathers(request)
    prefill = "gather" if gathers else "in_place"
    own_ops = frozenset({"index_logits"} if scores_by_deep_gemm(request, layer.kind) else ())
    kernels = request.platform == "cuda"
    return LayerPlan(
        padded_q_heads=heads,
        q_dtype="bfloat16",
        output=OutputSpec(padded=True),
        workspace_bytes=_workspace_bytes(layer, request, heads, gathers),
        variant=f"{heads} heads, prefill={prefill}, {_products(request, bool(own_ops))}",
        own_ops=own_ops,
        core_ops="triton" if kernels else "torch",
        projection_dtype="float8_e4m3fn" if kernels and libraries.has_deep_gemm(request.probe) else "",
        branches=True,
    )


def _products(request: Request, scores: bool) -> str:
    """Who does them, for people."""
    if lacking := libraries.deep_gemm_lacking(request.probe):
        return f"projections and scores by the core ({lacking})"
    return "wo_a and scores by DeepGEMM" if scores else "wo_a by DeepGEMM"


def scores_by_deep_gemm(request: Request, kind: LayerKind) -> bool:
    """Whether DeepGEMM has a kernel for the indexer of these layers."""
    if kind.select != "top_k" or request.seam == "kernel" or not libraries.has_deep_gemm(request.probe):
        return False
    model, fp8 = request.model, dsv4_resolve_kv_cache(request).index.name == "index_fp8"
    sizes = (model.index_n_heads in INDEX_HEADS, model.index_head_dim in INDEX_WIDTHS)
    return fp8 and all(sizes) and request.page_sizes.compressed_rows(kind) == INDEX_PAGE


def padded_heads(heads: int) -> int:
    """Heads of the kernel that serves so many."""
    return next(size for size in HEADS if heads <= size)


def _workspace_bytes(layer: LayerSpec, request: Request, heads: int, gathers: bool) -> int:
    """A bound: sums of parts; tables; the rows that are gathered; what the output projection needs."""
    from dsv4core.step import gather_area
    from dsv4core.workspace import LOGITS, kernel_bytes

    model, limits = layer.model, request.limits
    rows = min(limits.max_tokens, MOST_ROWS)
    parts = 4 * heads * (model.head_dim + 1) * (rows + PARTS)
    entries = layer.kind.visible_entries(limits.max_model_len)
    attended = min(model.index_topk, entries) if layer.kind.select == "top_k" else entries
    pages = entries // request.page_sizes.compressed_rows(layer.kind) + 4  # of each query, for its scores
    tables = 4 * limits.max_tokens * (model.sliding_window + attended + pages + 256)
    gathered = 2 * model.head_dim * gather_area(layer.kind, limits, model.sliding_window) if gathers else 0
    output = 2 * limits.max_tokens * heads * model.head_dim
    # Of prompts: the last one's scores, and their copies among those of all queries.
    scores = 8 * min(LOGITS, limits.max_tokens * entries) if layer.kind.select == "top_k" else 0
    return parts + scores + 3 * tables + gathered + 2 * output + kernel_bytes(layer, limits)


@hookimpl
def dsv4_init_layer_buffers(
    layer: LayerSpec, plan: LayerPlan, weights: LayerWeights, device: torch.device
) -> Layer:
    """Pad the sinks; bring the output projection into the form of its product."""
    from dsv4_plugin_flashmla.layer import Layer

    return Layer(layer, plan, weights, device)


@hookimpl
def dsv4_init_step_buffers(
    request: Request, kind: LayerKind, plan: LayerPlan, device: torch.device, options: FlashMLAOptions
) -> SharedStep:
    """What the layers of a kind share: index tables and tile schedules."""
    from dsv4_plugin_flashmla.layer import SharedStep

    return SharedStep(request, kind, plan, options.gathers(request), device)


@hookimpl
def dsv4_plan_step(kind_state: SharedStep, step: Step) -> None:
    """The tables and schedules of a step, anew each time: lengths are in them."""
    kind_state.plan(step)


@hookimpl
def dsv4_index_logits(
    state: Layer,
    q: torch.Tensor,
    weights: torch.Tensor,
    visible: torch.Tensor,
    tokens: slice,
    width: int,
    caches: LayerCaches,
    step: Step,
    kind_state: SharedStep,
) -> torch.Tensor:
    """Scores of decodes and of prompts by DeepGEMM; of others by the core's kernel."""
    return state.index_logits(q, weights, visible, tokens, width, caches, step, kind_state)


@hookimpl
def dsv4_forward_mqa(
    state: Layer,
    q: torch.Tensor,
    caches: LayerCaches,
    selected: torch.Tensor | None,
    step: Step,
    kind_state: SharedStep,
    want_lse: bool,
    apply_sink: bool,
) -> AttentionOutput:
    """Attend; the kernel's own output is returned where it is all of the step's."""
    return state.forward_mqa(q, caches, selected, step, kind_state, want_lse, apply_sink)


@hookimpl
def dsv4_o_proj(state: Layer, attention: AttentionOutput, positions: torch.Tensor) -> torch.Tensor:
    """Rotate back and project."""
    return state.o_proj(attention.data, positions)


@hookimpl
def dsv4_describe(state: Layer) -> dict[str, Any]:
    """Kernels, versions and prepared weights."""
    return state.describe()
