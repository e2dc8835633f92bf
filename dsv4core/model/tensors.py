"""What a layer's tensors must be: shapes, dtypes, and how ranks share them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4core.api import LayerKind, ModelShape

FP8 = "F8_E4M3"
PLAIN = ("BF16", "F32")
QUANTISED = (FP8, *PLAIN)
SCALE = ("F8_E8M0", "F32")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint, for the whole model.

    Attributes:
        shape: Its size.
        dtypes: Accepted dtypes, as safetensors names them.
        split: Dimension that tensor-parallel ranks share, None where each has all of it.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = PLAIN
    split: int | None = None

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} {list(self.shape)}"


def layer_tensors(shape: ModelShape, kind: LayerKind) -> dict[str, TensorSpec]:
    """The tensors of a layer of `kind` by name, `attn_norm` included.

    `wq_b` and `attn_sink` are shared by head, `wo_a` by output group, `wo_b` by its input; the others are
    whole on every rank, because every rank needs all keys and all chosen entries.
    """
    hidden, head = shape.hidden_size, shape.head_dim
    heads, groups = shape.num_attention_heads, shape.o_groups
    tensors = {
        "attn_norm": TensorSpec((hidden,)),
        "attn_sink": TensorSpec((heads,), split=0),
        "wq_a": TensorSpec((shape.q_lora_rank, hidden), QUANTISED),
        "q_norm": TensorSpec((shape.q_lora_rank,)),
        "wq_b": TensorSpec((heads * head, shape.q_lora_rank), QUANTISED, split=0),
        "wkv": TensorSpec((head, hidden), QUANTISED),
        "kv_norm": TensorSpec((head,)),
        "wo_a": TensorSpec((groups * shape.o_lora_rank, heads // groups * head), QUANTISED, split=0),
        "wo_b": TensorSpec((hidden, groups * shape.o_lora_rank), QUANTISED, split=1),
    }
    if kind.ratio is not None and kind.kv_source is None:
        tensors |= _compressor("compressor", kind, hidden, head)
    if kind.select == "top_k" and kind.index_source is None:
        queries = shape.index_n_heads * shape.index_head_dim
        tensors["indexer.wq_b"] = TensorSpec((queries, shape.q_lora_rank), QUANTISED)
        tensors["indexer.weights_proj"] = TensorSpec((shape.index_n_heads, hidden))
        tensors |= _compressor("indexer.compressor", kind, hidden, shape.index_head_dim)
    return tensors


def _compressor(name: str, kind: LayerKind, hidden: int, width: int) -> dict[str, TensorSpec]:
    assert kind.ratio is not None
    return {
        f"{name}.ape": TensorSpec((kind.ratio, kind.groups * width)),
        f"{name}.wkv": TensorSpec((kind.groups * width, hidden)),
        f"{name}.wgate": TensorSpec((kind.groups * width, hidden)),
        f"{name}.norm": TensorSpec((width,)),
    }
