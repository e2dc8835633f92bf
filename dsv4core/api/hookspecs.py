"""The contract: the hooks that a backend implements, in the order in which they are called.

A backend is one module (or object) that the entry-point group `dsv4core.backends` names. It marks its
functions with `hookimpl`; arguments are passed by name, so an implementation may leave out those that it
does not use. Each backend has a plugin manager of its own: all hooks of a layer come from one backend.

Selection hooks are pure and never import torch. Hot hooks run once per layer per step; they allocate only
through torch's caching allocator and never wait for the device. An exception in a hook is the caller's to
see, with a note that names the backend and the layer; None where a value is due is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from dsv4core.api.kvcache import KVCacheLayout
from dsv4core.api.layer import AttentionOutput, LayerCaches, LayerPlan, LayerSpec, LayerWeights
from dsv4core.api.model import LayerKind
from dsv4core.api.options import BackendOptions
from dsv4core.api.selection import BackendInfo, Reason, Request
from dsv4core.api.step import Step

if TYPE_CHECKING:
    import torch

API_VERSION = 0
SUPPORTED_API = frozenset({0})
PROJECT = "dsv4core"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

MANDATORY = frozenset(
    {
        "dsv4_backend_info",
        "dsv4_unsupported_reasons",
        "dsv4_resolve_kv_cache",
        "dsv4_plan_layer",
        "dsv4_init_layer_buffers",
        "dsv4_init_step_buffers",
        "dsv4_plan_step",
        "dsv4_forward_mqa",
        "dsv4_o_proj",
    }
)
"""Hooks that every backend implements; the others are optional."""


@hookspec(firstresult=True)
def dsv4_backend_info() -> BackendInfo:
    """Describe the backend. Called once at load; must not import torch."""


@hookspec(firstresult=True)
def dsv4_unsupported_reasons(request: Request, options: BackendOptions) -> Sequence[Reason]:
    """All reasons why `request` cannot run; empty if it can.

    With `request.probe == "static"` only distribution metadata may be read; with `"host"` the kernel
    library may be imported and its signatures, symbols and artifacts checked.
    """


@hookspec(firstresult=True)
def dsv4_resolve_kv_cache(request: Request, options: BackendOptions) -> KVCacheLayout:
    """Turn the asked `kv_cache_dtype` and `index_dtype` into formats. Pure: nothing is written back.

    Raises:
        ConfigError: A dtype is not accepted; the text lists those that are.
    """


@hookspec(firstresult=True)
def dsv4_plan_layer(request: Request, layer: LayerSpec, options: BackendOptions) -> LayerPlan:
    """Decide padding, dtypes, workspace and owned operations for one layer. Pure."""


@hookspec(firstresult=True)
def dsv4_init_layer_buffers(
    layer: LayerSpec, plan: LayerPlan, weights: LayerWeights, device: torch.device, options: BackendOptions
) -> Any:
    """Make a layer's own state (scales, recipes, prepared weights), once, when the layer is built.

    The result is handed to the hot hooks as `state`. Nothing is written to `weights` or to the host's
    modules. Weights named in `LayerPlan.consumes` may be freed by the core afterwards. At the kernel seam a
    host may keep all weights but `attn_sink` and the RoPE table to itself.
    """


@hookspec(firstresult=True)
def dsv4_init_step_buffers(
    request: Request, kind: LayerKind, plan: LayerPlan, device: torch.device, options: BackendOptions
) -> Any:
    """Make the buffers that all layers of one kind share within a step.

    They are allocated for `request.limits` and keep their addresses and strides, so that a captured graph
    stays valid. The result is handed on as `kind_state`. Once per kind, or more often where a host keeps the
    caches of a kind in several groups with block tables of their own, as vLLM does: each group then has a
    state and plans its steps.
    """


@hookspec(firstresult=True)
def dsv4_prepare_step(kind_state: Any, step: Step) -> None:
    """Host work before every run or replay of a step (optional). Never captured.

    A host that has no place before a replay refuses the backend where it captures graphs.
    """


@hookspec(firstresult=True)
def dsv4_plan_step(kind_state: Any, step: Step) -> None:
    """Device work once per step and layer kind: index tables, tile schedules. Captured with the step."""


@hookspec(firstresult=True)
def dsv4_insert_kv(
    layer: LayerSpec,
    state: Any,
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    caches: LayerCaches,
    step: Step,
) -> torch.Tensor:
    """Normalise and rotate q, rotate kv and store it in the window cache (owned operation `insert_kv`).

    Args:
        q: `[tokens, num_heads, head_dim]`, straight from `wq_b`.
        kv: `[tokens, head_dim]`, after `kv_norm`, not rotated.
        positions: `[tokens]` int64.

    Returns:
        q as `dsv4_forward_mqa` takes it: `[tokens, padded_q_heads, head_dim]` of `LayerPlan.q_dtype`.
    """


@hookspec(firstresult=True)
def dsv4_compress(
    layer: LayerSpec,
    state: Any,
    projected: torch.Tensor,
    positions: torch.Tensor,
    caches: LayerCaches,
    step: Step,
    target: Literal["compressed", "index"],
) -> None:
    """Store compressor state and the entries that this step completes (owned operation `compress`).

    Args:
        projected: `[tokens, 2 * groups * width]` fp32: projected KV, then projected score without ape.
        target: Which cache the entries go to; its state cache is `state` or `index_state`.
    """


@hookspec(firstresult=True)
def dsv4_index_logits(
    layer: LayerSpec,
    state: Any,
    q: torch.Tensor,
    weights: torch.Tensor,
    visible: torch.Tensor,
    tokens: slice,
    width: int,
    caches: LayerCaches,
    step: Step,
    kind_state: Any,
) -> torch.Tensor:
    """Score the entries that queries see (owned operation `index_logits`).

    A step whose scores would take more than 256 MB comes in several calls, each for `n` of its tokens side by
    side.

    Args:
        q: `[n, index_n_heads, index_head_dim]`, rotated and in the index cache's precision.
        weights: `[n, index_n_heads]` fp32, q's scale and both softmax factors folded in.
        visible: `[n]` int64, entries that a query sees, from the front: at position p `(p + 1) // ratio`.
        tokens: Which of the step's tokens they are.
        width: No query sees more entries; the same in every step where steps are captured.

    Returns:
        `[n, width]` fp32 by request-local entry number, or more columns. What lies behind a query's entries
        may be anything: `dsv4_index_topk` does not look there.
    """


@hookspec(firstresult=True)
def dsv4_index_topk(
    layer: LayerSpec, state: Any, logits: torch.Tensor, visible: torch.Tensor, step: Step
) -> torch.Tensor:
    """Choose the entries to attend (owned operation `index_topk`).

    Args:
        logits: `[n, entries]` fp32; behind a query's entries lies anything.
        visible: `[n]` int64, entries that a query sees, from the front.

    Returns:
        `[n, index_topk]` int32 request-local entry numbers, valid ones first, then -1. NaN and minus infinity
        are never chosen; ties go to the lowest entry.
    """


@hookspec(firstresult=True)
def dsv4_forward_mqa(
    layer: LayerSpec,
    state: Any,
    q: torch.Tensor,
    caches: LayerCaches,
    selected: torch.Tensor | None,
    positions: torch.Tensor,
    step: Step,
    kind_state: Any,
    out: torch.Tensor | None,
    want_lse: bool,
    apply_sink: bool,
) -> AttentionOutput:
    """Attend over the window and the compressed entries; keys are read through `caches` only.

    Args:
        q: `[tokens, padded_q_heads, head_dim]` of `LayerPlan.q_dtype`, normalised and rotated.
        selected: `[tokens, k]` int32 request-local entry numbers: as many as the query sees, at most `k`,
            then -1. None where the kind attends all entries or none.
        positions: `[tokens]` int64.
        out: A buffer of the planned shape that may be filled, or None. A backend may return its own instead.
        want_lse: Whether `AttentionOutput.lse` is wanted.
        apply_sink: Whether the sink takes part; a host that merges partial results applies it itself.

    Returns:
        The output in the form that `LayerPlan.output` declares. A query with nothing to attend gives exact 0.
    """


@hookspec(firstresult=True)
def dsv4_o_proj(
    layer: LayerSpec, state: Any, attention: AttentionOutput, positions: torch.Tensor
) -> torch.Tensor:
    """Rotate back (unless the plan says it is done) and project: `wo_a` by group, then `wo_b`.

    Returns:
        `[tokens, hidden_size]`: this rank's partial sum. The host reduces over ranks.
    """


@hookspec(firstresult=True)
def dsv4_describe(state: Any) -> dict[str, Any]:
    """Facts about a layer's state for explain, bench and bug reports (optional). Never on the hot path.

    Returns:
        What JSON can hold. `prepared_bytes` is the size of the weights that the state keeps besides the
        host's own.
    """
