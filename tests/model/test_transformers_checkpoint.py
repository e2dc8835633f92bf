"""Checkpoints as transformers saves them, in both of its formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4core.api import C4A, C128A, SWA
from dsv4core.model.checkpoint import Checkpoint

transformers = pytest.importorskip("transformers")

MODULES: Mapping[str, str] = {
    "attn_sink": "sinks",
    "wq_a": "q_a_proj.weight",
    "q_norm": "q_a_norm.weight",
    "wq_b": "q_b_proj.weight",
    "wkv": "kv_proj.weight",
    "kv_norm": "kv_norm.weight",
    "wo_a": "o_a_proj.weight",
    "wo_b": "o_b_proj.weight",
    "compressor.ape": "compressor.position_bias",
    "compressor.wkv": "compressor.kv_proj.weight",
    "compressor.wgate": "compressor.gate_proj.weight",
    "compressor.norm": "compressor.kv_norm.weight",
    "indexer.wq_b": "compressor.indexer.q_b_proj.weight",
    "indexer.weights_proj": "compressor.indexer.scorer.weights_proj.weight",
    "indexer.compressor.ape": "compressor.indexer.position_bias",
    "indexer.compressor.wkv": "compressor.indexer.kv_proj.weight",
    "indexer.compressor.wgate": "compressor.indexer.gate_proj.weight",
    "indexer.compressor.norm": "compressor.indexer.kv_norm.weight",
}


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.DeepseekV4Config(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=96,
        partial_rotary_factor=2 / 3,
        q_lora_rank=24,
        n_routed_experts=2,
        num_experts_per_tok=1,
        layer_types=[
            *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
        ],
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=72,
        index_topk=4,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 256},
        num_hash_layers=1,
    )
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize(
    "options", [{}, {"save_original_format": False}, {"max_shard_size": "20KB"}], ids=str
)
def test_saved_model_loads(model: Any, options: dict[str, Any], tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, **options)
    state = model.state_dict()
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.shape.layer_kinds == (SWA, C4A, C128A)
    assert checkpoint.shape.qk_rope_head_dim == 64
    checkpoint.verify(range(3))
    for index, count in enumerate((8, 18, 12)):
        weights = checkpoint.layer(index, max_positions=4).tensors
        assert len(weights) == count
        for name, weight in weights.items():
            assert torch.equal(weight.data, state[f"model.layers.{index}.self_attn.{MODULES[name]}"]), name
        norm = state[f"model.layers.{index}.input_layernorm.weight"]
        assert torch.equal(checkpoint.attn_norm(index), norm)
    assert torch.equal(checkpoint.embedding([9, 1]), state["model.embed_tokens.weight"][[9, 1]])
