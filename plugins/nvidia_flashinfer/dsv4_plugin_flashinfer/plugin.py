"""`backend=flashinfer`: what it is, what it can run, what it plans. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from dsv4_plugin_flashinfer import library
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
from dsv4core.workspace import kernel_bytes

if TYPE_CHECKING:
    import torch

    from dsv4_plugin_flashinfer import fa3, trtllm

KV_FORMATS = ("bf16", "fp8_e4m3")
INDEX_FORMATS = ("fp8", "bf16", "fp32")
ARCHITECTURES = ("sm_90", "sm_100", "sm_103")
HEADS = (8, 16, 32, 64, 128)
"""Query heads that TRTLLM-gen's kernels have; others are padded to the next."""
WINDOW = 128
"""Columns of a window that the kernels know of."""
WORKSPACE = 128 << 20
"""Bytes of TRTLLM-gen's workspace, as FlashInfer recommends."""
PLAN_WORKSPACE = 32 << 20
"""Bytes of FA3's: two tiles of 64 heads and 1,028 bytes for each of 132 processors are 17.4 million."""
PLAN_BYTES = 8 << 20
"""That FlashInfer takes for a plan, on the device and as many on the host."""
MOST_ROWS = 8192
"""Query tokens of one plan of FA3's: it holds 16,384 pieces of work, and divides some tokens."""
FA3_ARCHITECTURES = ("sm_90",)
FA3_CAPABILITIES = frozenset({"lse", "defer-sink", "needs-host-lengths", "private-output"})


@dataclass
class FlashInferOptions(BackendOptions):
    """Options of the backend.

    Attributes:
        launch: Whether TRTLLM-gen attends decodes and prefills of a step in two launches, or in one: its
            grid is as wide as the longest query for all of them.
        compressor: Whether entries are made by the core's kernels, or by the backend's in CuTe DSL, which
            need nvidia-cutlass-dsl. `auto` is the core's, which are faster.

    Raises:
        ConfigError: `launch` or `compressor` is none of them.
    """

    name: str = "flashinfer"
    launch: str = field(
        default="split",
        metadata={"help": "launches of decodes and prefills", "choices": ("split", "single")},
    )
    compressor: str = field(
        default="auto",
        metadata={"help": "kernels that compress", "choices": ("auto", "core", "cute")},
    )

    def __post_init__(self) -> None:
        """Refuse what would be taken for the default."""
        if self.launch not in ("split", "single"):
            raise ConfigError(f"backend.launch={self.launch} is not known; write split or single.")
        if self.compressor not in ("auto", "core", "cute"):
            raise ConfigError(f"backend.compressor={self.compressor} is not known; write auto, core or cute.")


@dataclass(frozen=True)
class Plan(LayerPlan):
    """A plan of one engine.

    Attributes:
        engine: Whose kernels attend: `fa3` or `trtllm-gen`.
    """

    engine: str = "trtllm-gen"


@hookimpl
def dsv4_backend_info() -> BackendInfo:
    """Describe the backend."""
    return BackendInfo(
        api=API_VERSION,
        options=FlashInferOptions,
        platforms=("cuda",),
        summary="FlashInfer kernels on plain caches for sm_90, sm_100 and sm_103",
        requirements=(library.REQUIREMENT,),
        capabilities=frozenset(
            {
                *("kernel-seam", "multi-token-decode", "strided-pages"),
                *("tensor-parallel", "graph"),
            }
        ),
        arch_capabilities=dict.fromkeys(FA3_ARCHITECTURES, FA3_CAPABILITIES),
    )


def engine_of(request: Request) -> str:
    """Whose kernels attend."""
    return "fa3" if request.arch in FA3_ARCHITECTURES else "trtllm-gen"


@hookimpl
def dsv4_unsupported_reasons(request: Request, options: FlashInferOptions) -> Sequence[Reason]:
    """Other architectures, sizes, activations, contexts over ranks; libraries that do not fit."""
    return list(_reasons(request, options))


def _reasons(request: Request, options: FlashInferOptions) -> Iterator[Reason]:
    if options.compressor == "cute":
        yield from library.cute_reasons(request.probe, request.platform)
    if request.platform == "cuda" and request.arch in ("sm_120", "sm_121"):
        text = f"FlashInfer's kernels for {request.arch} read packed rows, and this backend has plain ones."
        yield Reason("arch", text, "Use backend=triton.")
    elif request.platform == "cuda" and request.arch not in ARCHITECTURES:
        text = f"It is made for {', '.join(ARCHITECTURES)}, and this is {request.arch}."
        yield Reason("arch", text, "Use backend=triton.")
    else:
        yield from library.reasons(request.probe, request.arch, engine_of(request), request.strided_pages)
    yield from libraries.deep_gemm_reasons()
    model = request.model
    if model.sliding_window != WINDOW or model.head_dim != 512:
        text = (
            f"A window of {model.sliding_window} tokens and heads of {model.head_dim}, and its kernels have "
            f"{WINDOW} and 512."
        )
        yield Reason("model", text, "Use backend=triton.")
    if request.num_heads > HEADS[-1]:
        text = f"{request.num_heads} query heads a rank, and its kernels have {HEADS[-1]} at most."
        yield Reason("q-heads", text, "Raise tensor_parallel.")
    if request.dtype != "bfloat16":
        text = f"Activations are {request.dtype}, and its outputs are bfloat16."
        yield Reason("model", text, "Set dtype=bfloat16.")
    if request.context_parallel > 1:
        text = f"context_parallel={request.context_parallel}, and a rank's kernels read the whole context."
        yield Reason("parallel", text, "Set context_parallel=1.")


@hookimpl
def dsv4_resolve_kv_cache(request: Request) -> KVCacheLayout:
    """Plain rows only: bf16, or E4M3 with one scale a layer; pages are apart by whole rows."""
    kv = resolve_dtype("kv_cache_dtype", request.kv_cache_dtype, KV_CACHE_DTYPES, KV_FORMATS, "flashinfer")
    index = resolve_dtype("index_dtype", request.index_dtype, INDEX_DTYPES, INDEX_FORMATS, "flashinfer")
    layout = cache_layout(request.model, kv, index)
    row = max(layout.window.page_alignment, layout.window.bytes_per_token)
    window, compressed = (replace(own, page_alignment=row) for own in (layout.window, layout.compressed))
    return replace(layout, window=window, compressed=compressed)


@hookimpl
def dsv4_plan_layer(request: Request, layer: LayerSpec, options: FlashInferOptions) -> Plan:
    """Queries and heads as the engine takes them; the core's kernels for all else."""
    kernels, engine = request.platform == "cuda", engine_of(request)
    lacking = libraries.deep_gemm_lacking(request.probe) if kernels else "no GPU"
    product = f"the core ({lacking})" if lacking else "DeepGEMM"
    limits, model = request.limits, layer.model
    entries = layer.kind.visible_entries(limits.max_model_len)
    attended = min(model.index_topk, entries) if layer.kind.select == "top_k" else entries
    tables = 4 * limits.max_tokens * (2 * (WINDOW + attended) + 64)
    cute = options.compressor == "cute" and layer.kind.ratio is not None and request.seam == "layer"
    common = Plan(
        own_ops=frozenset({"compress"} if cute else ()),
        engine=engine,
        prepares=engine == "fa3",
        padded_q_heads=layer.num_heads,
        q_dtype="bfloat16",
        workspace_bytes=tables + kernel_bytes(layer, limits),
        variant=f"{engine}, wo_a by {product}",
        core_ops="triton" if kernels else "torch",
        projection_dtype="" if lacking else "float8_e4m3fn",
        branches=True,
    )
    if engine == "fa3":
        plans = -(-limits.max_tokens // MOST_ROWS) * PLAN_BYTES
        sums = 8 * limits.max_tokens * layer.num_heads
        # Sinks are taken away by what rotates heads back for DeepGEMM, which reads them anyway.
        private = request.seam == "layer" and request.private_output and not lacking
        return replace(
            common,
            workspace_bytes=common.workspace_bytes + PLAN_WORKSPACE + plans + sums,
            output=OutputSpec("private" if private else "dense"),
        )
    heads = next(size for size in HEADS if layer.num_heads <= size)
    fp8 = dsv4_resolve_kv_cache(request).window.name == "fp8_e4m3"
    return replace(
        common,
        padded_q_heads=heads,
        q_dtype="float8_e4m3fn" if fp8 else "bfloat16",
        output=OutputSpec(padded=True),
        workspace_bytes=common.workspace_bytes + 2 * WORKSPACE,
        variant=f"{engine}, {heads} heads, launch={options.launch}, wo_a by {product}",
    )


@hookimpl
def dsv4_init_layer_buffers(
    layer: LayerSpec, plan: Plan, weights: LayerWeights, device: torch.device
) -> fa3.Layer | trtllm.Layer:
    """Scales as numbers, sinks, the output projection prepared."""
    if plan.engine == "fa3":
        from dsv4_plugin_flashinfer import fa3

        return fa3.Layer(layer, plan, weights, device)
    from dsv4_plugin_flashinfer import trtllm

    return trtllm.Layer(layer, plan, weights, device)


@hookimpl
def dsv4_init_step_buffers(
    request: Request, kind: LayerKind, plan: Plan, device: torch.device, options: FlashInferOptions
) -> fa3.SharedStep | trtllm.SharedStep:
    """What the layers of a kind share: index tables, and the kernel's workspace."""
    if plan.engine == "fa3":
        from dsv4_plugin_flashinfer import fa3

        return fa3.SharedStep(request, kind, plan, dsv4_resolve_kv_cache(request).window, device)
    from dsv4_plugin_flashinfer import trtllm

    return trtllm.SharedStep(request, kind, plan, options.launch == "split", device)


@hookimpl
def dsv4_prepare_step(kind_state: fa3.SharedStep, step: Step) -> None:
    """FA3's work is divided on the host."""
    kind_state.prepare(step)


@hookimpl
def dsv4_plan_step(kind_state: fa3.SharedStep | trtllm.SharedStep, step: Step) -> None:
    """Tables that layers share."""
    kind_state.plan(step)


@hookimpl
def dsv4_compress(
    state: fa3.Layer | trtllm.Layer,
    projected: torch.Tensor,
    caches: LayerCaches,
    step: Step,
    target: Literal["compressed", "index"],
) -> None:
    """Entries and states, by the backend's kernels."""
    assert state.compressors is not None  # or the plan would leave it to the core
    state.compressors(projected, caches, step, target)


@hookimpl
def dsv4_forward_mqa(
    state: fa3.Layer | trtllm.Layer,
    q: torch.Tensor,
    caches: LayerCaches,
    selected: torch.Tensor | None,
    step: Step,
    kind_state: Any,
    want_lse: bool,
    apply_sink: bool,
) -> AttentionOutput:
    """Attend over rows in place."""
    return state.forward_mqa(q, caches, selected, step, kind_state, want_lse, apply_sink)


@hookimpl
def dsv4_o_proj(
    state: fa3.Layer | trtllm.Layer, attention: AttentionOutput, positions: torch.Tensor
) -> torch.Tensor:
    """Rotate back and project."""
    return state.o_proj(attention.data, positions)


@hookimpl
def dsv4_describe(state: fa3.Layer | trtllm.Layer) -> dict[str, Any]:
    """Kernels, versions, scales and prepared weights."""
    return state.describe()
