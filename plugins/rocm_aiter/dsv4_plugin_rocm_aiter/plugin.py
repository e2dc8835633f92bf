"""`backend=rocm_aiter`: what it is, what it can run, what it plans. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from dsv4_plugin_rocm_aiter import library
from dsv4_plugin_rocm_aiter.routes import (
    ARCHITECTURES,
    OPERATIONS,
    TOGETHER,
    Asked,
    Route,
    Symbol,
    routes,
    symbol_of,
)
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
from dsv4core.api.kvcache import round_up
from dsv4core.framework.kernels import TRITON, kernel_reasons
from dsv4core.kvcache import INDEX_DTYPES, KV_CACHE_DTYPES, cache_layout, resolve_dtype, with_fp8_flavour

if TYPE_CHECKING:
    import torch

    from dsv4_plugin_rocm_aiter.layer import Layer, SharedStep

KV_FORMATS = ("fp8_ds_mla", "bf16")
INDEX_FORMATS = ("fp8", "bf16", "fp32")
FNUZ = ("gfx942",)
"""Chips whose FP8 instructions take FNUZ codes: hosts there keep windows in them, and entries in OCP's."""
MOST_QUERIES = 8192
"""Query tokens of a call: with 128 heads they take 2^30 bytes, and AITER's offsets in them have 32 bits."""
INT_MAX = 2**31 - 1
PROJECTIONS = ("auto", "einsum", "core")
OWN = ("index_logits", "index_topk")
"""Hooks that are implemented where AITER has a route for them."""

RotatesBack = Literal["quantisation", "einsum", "projection"]
"""Who applies the inverse RoPE: AITER's quantisation, a kernel before the einsum, the core's projection."""
ROTATION: Mapping[RotatesBack, str] = MappingProxyType(
    {
        "quantisation": "by the quantisation, or before an einsum where scales are no powers of two",
        "einsum": "before the einsum",
        "projection": "by the core's projection",
    }
)
"""The same for people. Scales are not known before weights are."""


@dataclass
class AiterOptions(BackendOptions):
    """Options of the backend.

    Attributes:
        core: Operations that the core does, whatever AITER has for them.
        projection: Who multiplies with `wo_a`: AITER in FP8 where it can, else torch with bf16 weights
            (`auto`); torch in any case (`einsum`); the core's kernel, whose weights stay FP8 (`core`).

    Raises:
        ConfigError: An operation or a projection is not known.
    """

    name: str = "rocm_aiter"
    core: list[str] = field(
        default_factory=list, metadata={"help": f"operations left to the core: {', '.join(OPERATIONS)}"}
    )
    projection: str = field(
        default="auto", metadata={"help": "who multiplies with wo_a", "choices": PROJECTIONS}
    )

    def __post_init__(self) -> None:
        """Refuse what would be taken for the default."""
        if unknown := [op for op in self.core if op not in OPERATIONS]:
            known = ", ".join(OPERATIONS)
            raise ConfigError(f"backend.core={unknown} names no operations; they are {known}.")
        if self.projection not in PROJECTIONS:
            raise ConfigError(
                f"backend.projection={self.projection} is not known; write auto, einsum or core."
            )


@dataclass(frozen=True)
class Plan(LayerPlan):
    """A plan, and who does what.

    Attributes:
        routes: By operation that a layer does: the address of AITER's symbol, or `the core`.
        rotates_back: Who applies the inverse RoPE.
    """

    routes: Mapping[str, str] = field(default_factory=dict, hash=False)
    rotates_back: RotatesBack = "projection"

    def symbol(self, op: str) -> Symbol | None:
        """AITER's symbol for an operation; None for the core."""
        return symbol_of(op, self.routes.get(op))


@hookimpl
def dsv4_backend_info() -> BackendInfo:
    """Describe the backend."""
    return BackendInfo(
        api=API_VERSION,
        options=AiterOptions,
        platforms=("rocm",),
        summary="AITER kernels for gfx942 and gfx950",
        requirements=(library.REQUIREMENT, TRITON),
        capabilities=frozenset(
            {
                *("kernel-seam", "lse", "defer-sink", "multi-token-decode", "strided-pages"),
                *("tensor-parallel", "graph"),
            }
        ),
    )


def chip_of(request: Request) -> str:
    """The chip that routes are for."""
    return request.arch


@hookimpl
def dsv4_unsupported_reasons(request: Request) -> Sequence[Reason]:
    """Other chips and activations, contexts over ranks; an AITER that does not fit."""
    return list(_reasons(request))


def _reasons(request: Request) -> Iterator[Reason]:
    if request.platform == "rocm" and request.arch not in ARCHITECTURES:
        text = f"It is made for {' and '.join(ARCHITECTURES)}, and this is {request.arch}."
        yield Reason("arch", text, "Use backend=reference.")
    elif request.platform == "rocm":
        yield from library.reasons(request.probe)
        yield from kernel_reasons(request)
    if request.model.head_dim != 512:
        text = f"Heads have {request.model.head_dim} channels, and AITER's kernels have 512."
        yield Reason("head-dim", text, "Use backend=reference.")
    if request.dtype != "bfloat16":
        text = f"Activations are {request.dtype}, and AITER's queries and outputs are bfloat16."
        yield Reason("model", text, "Set dtype=bfloat16.")
    if request.context_parallel > 1:
        text = f"context_parallel={request.context_parallel}, and a rank's kernels read the whole context."
        yield Reason("parallel", text, "Set context_parallel=1.")
    tokens, most = request.limits.max_tokens, max(_attended(request, kind) for kind in request.model.kinds)
    if tokens * most > INT_MAX:
        text = f"{tokens:,} query tokens attend up to {most:,} rows of a pool each, and AITER's lists of them"
        text += f" end at {INT_MAX:,}."
        yield Reason("model", text, f"Set max_tokens={INT_MAX // most} or less, or max_model_len lower.")


def _attended(request: Request, kind: LayerKind) -> int:
    """Rows of one pool that a query attends at most, as lists are allocated."""
    model = request.model
    entries = round_up(kind.visible_entries(request.limits.max_model_len), 16)
    return max(model.sliding_window, model.index_topk if kind.select == "top_k" else entries)


@hookimpl
def dsv4_resolve_kv_cache(request: Request) -> KVCacheLayout:
    """Packed or bf16 rows. On gfx942 a packed window has FNUZ codes, and packed entries OCP's."""
    kv = resolve_dtype("kv_cache_dtype", request.kv_cache_dtype, KV_CACHE_DTYPES, KV_FORMATS, "rocm_aiter")
    index = resolve_dtype("index_dtype", request.index_dtype, INDEX_DTYPES, INDEX_FORMATS, "rocm_aiter")
    layout = cache_layout(request.model, kv, index)
    if chip_of(request) in FNUZ and layout.window.fp8 is not None:
        return replace(layout, window=with_fp8_flavour(layout.window, "e4m3fnuz"))
    return layout


@hookimpl
def dsv4_plan_layer(request: Request, layer: LayerSpec, options: AiterOptions) -> Plan:
    """Each operation's route; the core's kernels for what AITER has none for."""
    aiter = library.found(request.probe)
    own = routes(_asked(request, layer, options), aiter)
    if request.seam == "kernel" or layer.kind.select != "top_k":  # the host chooses entries, or nobody does
        own = {op: route for op, route in own.items() if op not in OWN}
    decode, projects = own["decode"], own["o_proj"].symbol is not None
    rotates: RotatesBack = "quantisation" if projects else "einsum"
    if options.projection == "core" or set(TOGETHER) & set(options.core):
        rotates = "projection"
    served = [op for op, route in own.items() if route.symbol is not None]
    return Plan(
        padded_q_heads=decode.heads,
        q_dtype="bfloat16",
        output=OutputSpec(padded=decode.heads > layer.num_heads),
        workspace_bytes=_workspace_bytes(layer, request, own),
        variant=f"AITER for {', '.join(served) or 'nothing'}; inverse RoPE {ROTATION[rotates]}",
        own_ops=frozenset(OWN) & frozenset(served),
        core_ops="triton" if request.platform == "rocm" else "torch",
        projection_dtype="float8_e4m3fn" if projects else "",
        branches=True,
        notes=(f"{aiter.versions}; {library.SOURCES}", *map(str, own.values())),
        routes={op: route.symbol.address if route.symbol else "the core" for op, route in own.items()},
        rotates_back=rotates,
    )


def _asked(request: Request, layer: LayerSpec, options: AiterOptions) -> Asked:
    layout = dsv4_resolve_kv_cache(request)
    left = set(options.core)
    if options.projection != "auto":
        left.add("o_proj")
    return Asked(
        chip_of(request),
        layout.window.name,
        layout.index.name,
        pools=1 if layer.kind.ratio is None else 2,
        heads=layer.num_heads,
        softmax_scale=layer.model.softmax_scale,
        strided=request.strided_pages,
        core=frozenset(left),
    )


def _workspace_bytes(layer: LayerSpec, request: Request, own: dict[str, Route]) -> int:
    """A bound: lists and tables, sums of parts, gathered rows, scores, and what the core's kernels take."""
    from dsv4core.step import gather_area
    from dsv4core.workspace import LOGITS, kernel_bytes

    model, limits, kind = layer.model, request.limits, layer.kind
    entries = kind.visible_entries(limits.max_model_len)
    attended = min(model.index_topk, entries) if kind.select == "top_k" else entries
    owners = limits.max_tokens if kind.select == "top_k" else limits.max_requests
    lists = 4 * limits.max_tokens * (2 * (model.sliding_window + attended) + 16)
    tables = 4 * (limits.max_tokens * (2 * model.sliding_window + 16) + 2 * owners * attended)
    heads = own["decode"].heads
    parts = 4 * 256 * 16 * (model.head_dim + 2) if own["decode"].symbol else 0
    gathered = scores = 0
    if own["prefill"].symbol is not None:
        width = attended + model.sliding_window + 128
        gathered = 2 * model.head_dim * gather_area(kind, limits, model.sliding_window)
        gathered += 3 * 4 * min(limits.max_tokens * width, 1 << 24)
    if kind.select == "top_k":
        scores = 3 * 4 * min(LOGITS, limits.max_tokens * entries) + 24 * limits.max_tokens * attended
    output = 2 * limits.max_tokens * heads * model.head_dim
    return lists + tables + parts + gathered + scores + 3 * output + kernel_bytes(layer, limits)


@hookimpl
def dsv4_init_layer_buffers(
    layer: LayerSpec, plan: Plan, weights: LayerWeights, device: torch.device
) -> Layer:
    """Sinks as AITER's kernels take them; the output projection in the form of its product."""
    from dsv4_plugin_rocm_aiter.layer import Layer

    return Layer(layer, plan, weights, device)


@hookimpl
def dsv4_init_step_buffers(request: Request, kind: LayerKind, plan: Plan, device: torch.device) -> SharedStep:
    """What the layers of a kind share: tables of slots, and ragged lists of them."""
    from dsv4_plugin_rocm_aiter.layer import SharedStep

    return SharedStep(request, kind, plan, device)


@hookimpl
def dsv4_plan_step(kind_state: SharedStep, step: Step) -> None:
    """The window's list, and that of entries where layers choose none."""
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
) -> torch.Tensor:
    """Scores of prompts by AITER; of others by the core's kernel."""
    return state.index_logits(q, weights, visible, tokens, width, caches, step)


@hookimpl
def dsv4_index_topk(state: Layer, logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """The best entries in ascending order, by AITER's stable selection."""
    return state.index_topk(logits, visible)


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
    """Attend over the window and the selected entries, or all of them."""
    return state.forward_mqa(q, caches, selected, step, kind_state, want_lse, apply_sink)


@hookimpl
def dsv4_o_proj(state: Layer, attention: AttentionOutput, positions: torch.Tensor) -> torch.Tensor:
    """Rotate back and project."""
    return state.o_proj(attention.data, positions)


@hookimpl
def dsv4_describe(state: Layer) -> dict[str, Any]:
    """Routes, versions and prepared weights."""
    return state.describe()
