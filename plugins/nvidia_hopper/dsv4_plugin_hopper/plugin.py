"""`backend=hopper`: what it is, what it can run, what it plans. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    Reason,
    Request,
    Requirement,
    Step,
    hookimpl,
)
from dsv4core.kvcache import INDEX_DTYPES, KV_CACHE_DTYPES, cache_layout, resolve_dtype
from dsv4core.workspace import kernel_bytes

if TYPE_CHECKING:
    import torch

    from dsv4_plugin_hopper.layer import Layer, SharedStep

KV_FORMATS = ("fp8_ds_mla", "bf16", "fp8_e4m3")
INDEX_FORMATS = ("fp8", "bf16", "fp32")
OPERANDS = ("bf16", "f16")
E4M3_IN_F16 = "backend.operands=f16 would lose small weights of E4M3 rows, which a pool's scale multiplies"
NVRTC = Requirement("cuda.bindings", "cuda-bindings", "pip install 'cuda-bindings>=12.9'", ">=12.9")


@dataclass
class HopperOptions(BackendOptions):
    """Options of the backend.

    Attributes:
        operands: What codes of packed rows are turned into. `f16` has weights of three more bits, for queries
            and keys below 65,504, and is as fast. Rows of bf16 are not turned, and those of E4M3 refuse it.

    Raises:
        ConfigError: `operands` is neither.
    """

    name: str = "hopper"
    operands: str = field(default="bf16", metadata={"help": "operands of products", "choices": OPERANDS})

    def __post_init__(self) -> None:
        """Refuse what would be taken for the default."""
        if self.operands not in OPERANDS:
            raise ConfigError(f"backend.operands={self.operands} is not known; write bf16 or f16.")


@hookimpl
def dsv4_backend_info() -> BackendInfo:
    """Describe the backend."""
    return BackendInfo(
        api=API_VERSION,
        options=HopperOptions,
        platforms=("cuda",),
        summary="warp-specialised kernels for sm_90",
        requirements=(NVRTC,),
        capabilities=frozenset(
            {
                *("kernel-seam", "lse", "defer-sink", "multi-token-decode", "strided-pages"),
                *("tensor-parallel", "graph"),
            }
        ),
    )


@hookimpl
def dsv4_unsupported_reasons(request: Request, options: HopperOptions) -> Sequence[Reason]:
    """Other architectures, sizes, activations, contexts over ranks; f16 for E4M3 rows."""
    return list(_reasons(request, options))


def _reasons(request: Request, options: HopperOptions) -> Iterator[Reason]:
    if request.platform == "cuda" and request.arch != "sm_90":
        yield Reason("arch", f"It is made for sm_90, and this is {request.arch}.", "Use backend=triton.")
    elif request.platform == "cuda" and request.probe == "host" and libraries.installed("cuda-bindings"):
        yield from _compiler_reasons()
    yield from libraries.deep_gemm_reasons()
    if request.model.head_dim != 512:
        text = f"Heads have {request.model.head_dim} channels, and its kernel has 512."
        yield Reason("head-dim", text, "Use backend=triton.")
    if request.dtype != "bfloat16":
        text = f"Activations are {request.dtype}, and its queries and outputs are bfloat16."
        yield Reason("model", text, "Set dtype=bfloat16.")
    if request.context_parallel > 1:
        text = f"context_parallel={request.context_parallel}, and a rank's kernel reads the whole context."
        yield Reason("parallel", text, "Set context_parallel=1.")
    if options.operands == "f16" and request.kv_cache_dtype == "fp8_e4m3":
        yield Reason("option", f"{E4M3_IN_F16}.", "Set backend.operands=bf16.")


def _compiler_reasons() -> Iterator[Reason]:
    try:
        import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except Exception as error:  # the library of another CUDA, or none
        text = f"NVRTC, which compiles its kernels, cannot be loaded: {error}."
        fix = "Run `pip install nvidia-cuda-nvrtc` for the CUDA that torch and cuda-bindings are of."
        yield Reason("artifact-missing", text, fix)


@hookimpl
def dsv4_resolve_kv_cache(request: Request) -> KVCacheLayout:
    """Packed rows, or plain ones of bf16 or E4M3 codes."""
    kv = resolve_dtype("kv_cache_dtype", request.kv_cache_dtype, KV_CACHE_DTYPES, KV_FORMATS, "hopper")
    index = resolve_dtype("index_dtype", request.index_dtype, INDEX_DTYPES, INDEX_FORMATS, "hopper")
    return cache_layout(request.model, kv, index)


@hookimpl
def dsv4_plan_layer(request: Request, layer: LayerSpec, options: HopperOptions) -> LayerPlan:
    """Heads as they are; the core's kernels for all that is not attention."""
    limits, model = request.limits, layer.model
    lacking = libraries.deep_gemm_lacking(request.probe)
    entries = layer.kind.visible_entries(limits.max_model_len)
    attended = min(model.index_topk, entries) if layer.kind.select == "top_k" else entries
    owners = limits.max_tokens if layer.kind.select == "top_k" else limits.max_requests
    tables = 4 * limits.max_tokens * (2 * model.sliding_window + 8) + 8 * owners * attended
    product = f"the core ({lacking})" if lacking else "DeepGEMM"
    return LayerPlan(
        padded_q_heads=layer.num_heads,
        q_dtype="bfloat16",
        workspace_bytes=tables + 4 * limits.max_tokens * layer.num_heads + kernel_bytes(layer, limits),
        variant=f"{options.operands} operands, wo_a by {product}",
        core_ops="triton" if request.platform == "cuda" else "torch",
        projection_dtype="" if lacking else "float8_e4m3fn",
        branches=True,
    )


@hookimpl
def dsv4_init_layer_buffers(
    layer: LayerSpec, plan: LayerPlan, weights: LayerWeights, device: torch.device, options: HopperOptions
) -> Layer:
    """Sinks in fp32, the output projection prepared; the kernel is compiled here, and not in a capture."""
    from dsv4_plugin_hopper.layer import Layer

    return Layer(layer, plan, weights, device, options.operands == "f16")


@hookimpl
def dsv4_init_step_buffers(
    request: Request, kind: LayerKind, plan: LayerPlan, device: torch.device
) -> SharedStep:
    """What the layers of a kind share: tables of slots, and their lengths."""
    from dsv4_plugin_hopper.layer import SharedStep

    return SharedStep(request, kind, plan, device)


@hookimpl
def dsv4_plan_step(kind_state: SharedStep, step: Step) -> None:
    """The window's table, and that of entries where layers choose none."""
    kind_state.plan(step)


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
    """Attend over rows in place."""
    return state.forward_mqa(q, caches, selected, step, kind_state, want_lse, apply_sink)


@hookimpl
def dsv4_o_proj(state: Layer, attention: AttentionOutput, positions: torch.Tensor) -> torch.Tensor:
    """Rotate back and project."""
    return state.o_proj(attention.data, positions)


@hookimpl
def dsv4_describe(state: Layer) -> dict[str, Any]:
    """Kernels, versions and prepared weights."""
    return state.describe()
