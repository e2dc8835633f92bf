"""The model as plain frozen data: layer kinds, RoPE parameters, sizes, named as in config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Select = Literal["none", "top_k", "all"]


@dataclass(frozen=True)
class LayerKind:
    """What a query of a layer sees besides its window of raw tokens.

    Attributes:
        ratio: Raw tokens folded into one compressed entry, or None for a layer that has only the window.
        select: Which visible entries a query attends: `none`, the indexer's `top_k`, or `all`.
        overlap: Whether an entry pools two groups of `ratio` tokens (its own and the one before).
        kv_source: Index of the layer whose compressed cache is read; None is this layer's own.
        index_source: Index of the layer whose chosen entries are used; None is this layer's own.
    """

    ratio: int | None
    select: Select
    overlap: bool
    kv_source: int | None = None
    index_source: int | None = None

    @property
    def name(self) -> str:
        """`swa` for a window-only layer, else `c<ratio>a`."""
        return "swa" if self.ratio is None else f"c{self.ratio}a"

    @property
    def groups(self) -> int:
        """Groups of `ratio` tokens that one entry pools: 2 with overlap, else 1 (`coff` in upstream code)."""
        return 2 if self.overlap else 1

    @property
    def state_window(self) -> int:
        """Raw tokens whose compressor state the next entry may still need; 0 without a compressor."""
        return 0 if self.ratio is None else self.groups * self.ratio

    def visible_entries(self, length: int) -> int:
        """Compressed entries that a query sees when `length` tokens, its own included, are known."""
        return 0 if self.ratio is None else length // self.ratio


SWA = LayerKind(ratio=None, select="none", overlap=False)
C4A = LayerKind(ratio=4, select="top_k", overlap=True)
C128A = LayerKind(ratio=128, select="all", overlap=False)


@dataclass(frozen=True)
class YarnParameters:
    """YaRN interpolation of the RoPE frequencies; the magnitude factor is always 1 in this model."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class RopeParameters:
    """RoPE of one class of layers: base frequency, and YaRN where the layers have a compressor."""

    theta: float
    yarn: YarnParameters | None = None


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a DeepSeek-V4 model's attention, for the whole model (not one rank).

    Attributes:
        layer_kinds: One kind for each of the `num_hidden_layers` backbone layers.
        draft_layer_kinds: Kinds of the draft (MTP) layers that a config lists after the backbone.
        rope: RoPE of window-only layers.
        compress_rope: RoPE of layers with a compressor: q, window KV, entries and indexer alike.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    layer_kinds: tuple[LayerKind, ...]
    rope: RopeParameters
    compress_rope: RopeParameters
    draft_layer_kinds: tuple[LayerKind, ...] = ()

    @property
    def softmax_scale(self) -> float:
        """`head_dim ** -0.5`; YaRN adds no factor in this model."""
        return float(self.head_dim**-0.5)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct layer kinds, in order of first use."""
        return tuple(dict.fromkeys(self.layer_kinds))

    def rope_of(self, kind: LayerKind) -> RopeParameters:
        """The RoPE parameters of layers of `kind`."""
        return self.rope if kind.ratio is None else self.compress_rope
