"""One layer: what it is, what a backend plans for it, its weights, its caches, and its attention output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from dsv4core.api.kvcache import DTYPE_BYTES
from dsv4core.api.model import LayerKind, ModelShape

if TYPE_CHECKING:
    import torch

    from dsv4core.kvcache import KVCache

OWN_OPS = frozenset({"insert_kv", "compress", "index_logits", "index_topk"})
"""Operations that a backend may take over: each is the optional hook `dsv4_<name>`."""
CoreOps = Literal["torch", "triton"]
"""Implementations of the core's operations."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer on one rank.

    Attributes:
        index: Layer number in the model.
        kind: What its queries see.
        model: The whole model's sizes.
        num_heads: Query heads of this rank.
        head_start: First of them in the model's numbering; sinks are sliced accordingly.
        num_groups: Output-projection groups of this rank.
    """

    index: int
    kind: LayerKind
    model: ModelShape
    num_heads: int
    head_start: int = 0
    num_groups: int = 1

    @property
    def name(self) -> str:
        """`layers.<index>`, as in checkpoints and messages."""
        return f"layers.{self.index}"


@dataclass(frozen=True)
class OutputSpec:
    """What `dsv4_forward_mqa` hands to `dsv4_o_proj`.

    Attributes:
        format: `dense`: a tensor in the activation dtype that anybody may read; `private`: an object that
            only this backend's `dsv4_o_proj` reads.
        padded: Whether the head axis has the plan's padded heads.
        inverse_rotated: Whether the rotary dimensions were rotated back already.
    """

    format: Literal["dense", "private"] = "dense"
    padded: bool = False
    inverse_rotated: bool = False


@dataclass(frozen=True)
class LayerPlan:
    """A backend's decisions for one layer.

    Attributes:
        padded_q_heads: Size of the head axis of q, at least `LayerSpec.num_heads`. Padded heads of q are
            exact zeros and their sink is minus infinity.
        q_dtype: Dtype name of the q that `dsv4_forward_mqa` receives.
        output: The attention output's form.
        workspace_bytes: Most bytes that a hook takes from torch's allocator besides what it returns, each of
            those that run beside each other; a step's state keeps no more than that, either.
        variant: Kernel variant, for people.
        own_ops: Names from `OWN_OPS` that this backend does itself.
        core_ops: What the core does the others with, and its projections: `torch` are the definitions,
            `triton` the kernels of `dsv4core.ops.triton`, which need the package triton and a GPU.
        consumes: Names of weights that the core may free after `dsv4_init_layer_buffers`.
        projection_dtype: Dtype name of the activations that the output projection multiplies; the activation
            dtype if empty. FP8 is coarser, and results are checked accordingly.
        branches: Whether hooks before attention may run beside each other, on streams of their own: inserting
            keys, compressing attended entries, and the indexer with its compressor. None of them writes what
            another reads or writes.
        prepares: Whether steps need `dsv4_prepare_step`, where the backend implements it.
        notes: What the decisions rest on, a line each, for people: versions, what was passed over and why.
    """

    padded_q_heads: int
    q_dtype: str
    output: OutputSpec = OutputSpec()
    workspace_bytes: int = 0
    variant: str = ""
    own_ops: frozenset[str] = field(default_factory=frozenset)
    core_ops: CoreOps = "torch"
    consumes: frozenset[str] = field(default_factory=frozenset)
    projection_dtype: str = ""
    branches: bool = False
    prepares: bool = True
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("q_dtype", "projection_dtype"):
            value = getattr(self, name)
            if value not in DTYPE_BYTES and (value or name == "q_dtype"):
                known = ", ".join(DTYPE_BYTES)
                raise ValueError(f"{name} {value!r} is no dtype name; use one of {known}.")
        for name in ("padded_q_heads", "workspace_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r} of a plan cannot be; give a number that is not negative.")
        if not isinstance(self.output, OutputSpec):
            raise ValueError(f"output={self.output!r} of a plan cannot be; give an OutputSpec.")
        if not (isinstance(self.notes, tuple) and all(isinstance(line, str) for line in self.notes)):
            raise ValueError(f"notes={self.notes!r} of a plan cannot be; give a tuple of lines.")
        unknown = sorted(self.own_ops - OWN_OPS)
        if unknown:
            known = ", ".join(sorted(OWN_OPS))
            raise ValueError(f"own_ops {unknown} are not known; a backend may own {known}.")
        if self.core_ops not in get_args(CoreOps):
            raise ValueError(f"core_ops={self.core_ops!r} of a plan is not known; use torch or triton.")


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix or vector of one rank.

    Attributes:
        data: `[out, in]` or `[n]`: FP8 with a scale, or bf16/fp32 without one.
        scale: `[ceil(out / block[0]), ceil(in / block[1])]`, E8M0 or fp32, or None.
        block: Rows and columns that share a scale.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    block: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of data and scale."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


@dataclass(frozen=True)
class LayerScales:
    """What FP8 values of a layer with one scale a tensor are divided by before they are rounded.

    E4M3 holds magnitudes from 2^-9 to 448, and three bits of each from 2^-6 on. So a scale is well chosen
    where the largest value over it is a little below 448.

    Attributes:
        q: Of FP8 queries, after norm and rotation.
        kv: Of the rows of window and compressed caches, after rotation.

    Raises:
        ValueError: A scale is no positive number.
    """

    q: float = 1.0
    kv: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isinstance(value, float) and 0 < value < float("inf")):
                raise ValueError(f"{name}={value!r} cannot be a scale; give a positive number.")


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The weights of one layer, this rank's shard, and its RoPE table.

    Attributes:
        tensors: By official checkpoint name without prefix and suffix: `attn_sink`, `wq_a`, `q_norm`,
            `wq_b`, `wkv`, `kv_norm`, `wo_a`, `wo_b`, `compressor.{ape,wkv,wgate,norm}`,
            `indexer.{wq_b,weights_proj}`, `indexer.compressor.{ape,wkv,wgate,norm}`. Sinks are finite or
            minus infinity.
        rope: `[max_positions, rope_dim]` fp32: the first half of the columns cosines, the second half sines.
            Shared by all layers of one RoPE class.
        scales: Of plain FP8 queries and caches; those that a host passes have the same `KVCache.scale`.
    """

    tensors: Mapping[str, Weight]
    rope: torch.Tensor
    scales: LayerScales = LayerScales()

    def __getitem__(self, name: str) -> Weight:
        return self.tensors[name]


@dataclass(frozen=True, eq=False)
class LayerCaches:
    """The caches of one layer. They are passed with each call and never owned by a backend.

    Attributes:
        window: Raw tokens.
        compressed: Compressed entries, those of the kind's source layer where it has one; None without any.
        index: The indexer's keys; None without an indexer.
        state: Compressor state of recent raw tokens.
        index_state: The same of the indexer's compressor.
    """

    window: KVCache
    compressed: KVCache | None = None
    index: KVCache | None = None
    state: KVCache | None = None
    index_state: KVCache | None = None


@dataclass(frozen=True, eq=False)
class AttentionOutput:
    """Result of `dsv4_forward_mqa`.

    Attributes:
        data: `[tokens, heads, head_dim]` as `LayerPlan.output` declares, or the backend's private object.
        lse: `[tokens, num_heads]` fp32 where asked for, else None: natural log of the sum of the attended
            exponentials, the sink excluded, minus infinity where nothing is attended.
    """

    data: Any
    lse: torch.Tensor | None = None
