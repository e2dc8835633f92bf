"""A small DeepSeek-V4 with seeded weights of a standard deviation that makes its logits differ.

The sizes are those that vLLM's CPU kernels accept: 256 experts, 6 a token, index_topk 512, heads of 512.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsv4core.model.names import layer_names
from dsv4core.model.shapes import model_shape
from dsv4core.model.tensors import layer_tensors

STD = 0.05
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_lora_rank": 128,
    "o_groups": 2,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "num_hash_layers": 1,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "vocab_size": 1024,
    "sliding_window": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65536,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_checkpoint(folder: Path) -> None:
    """Write `config.json` and one file of weights in the official names, if they are not there yet."""
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    save_file(dict(_tensors()), folder / "model.safetensors", metadata={"format": "pt"})


def _tensors() -> Iterator[tuple[str, torch.Tensor]]:
    hidden, vocabulary = CONFIG["hidden_size"], CONFIG["vocab_size"]
    streams = CONFIG["hc_mult"]
    yield "embed.weight", _random("embed.weight", vocabulary, hidden) * 20
    yield "head.weight", _random("head.weight", vocabulary, hidden)
    yield "norm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    yield from _hyper_connection("hc_head", streams, streams * hidden, 1)
    shape = model_shape(CONFIG)
    for index, kind in enumerate(shape.layer_kinds):
        for name, spec in layer_tensors(shape, kind).items():
            full = layer_names(shape, index, name)[0]
            norm = name.endswith("norm")
            value = torch.ones(*spec.shape) if norm else _random(full, *spec.shape, dtype=torch.float32)
            exact = name.endswith(("ape", "attn_sink"))
            yield full, value if exact else value.bfloat16()
        yield from _experts(f"layers.{index}", index)


def _experts(layer: str, index: int) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, width = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
    experts, streams = CONFIG["n_routed_experts"], CONFIG["hc_mult"]
    yield f"{layer}.ffn_norm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    for part in ("hc_attn", "hc_ffn"):
        yield from _hyper_connection(f"{layer}.{part}", (2 + streams) * streams, streams * hidden, 3)
    yield f"{layer}.ffn.gate.weight", _random(f"{layer}.ffn.gate.weight", experts, hidden)
    if index < CONFIG["num_hash_layers"]:
        generator = torch.Generator().manual_seed(index)
        table = torch.rand(CONFIG["vocab_size"], experts, generator=generator)
        yield f"{layer}.ffn.gate.tid2eid", table.topk(CONFIG["num_experts_per_tok"]).indices.int()
    else:
        yield f"{layer}.ffn.gate.bias", torch.zeros(experts)
    for name in (*(f"experts.{number}" for number in range(experts)), "shared_experts"):
        for part, sizes in {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}.items():
            full = f"{layer}.ffn.{name}.{part}.weight"
            yield full, _random(full, *sizes)


def _hyper_connection(name: str, rows: int, columns: int, scales: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{name}_fn", _random(f"{name}_fn", rows, columns, dtype=torch.float32)
    yield f"{name}_base", torch.zeros(rows)
    yield f"{name}_scale", torch.ones(scales)


def _random(name: str, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(*sizes, generator=generator) * STD).to(dtype)
