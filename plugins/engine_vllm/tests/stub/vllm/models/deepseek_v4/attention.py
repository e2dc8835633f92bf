"""The base class of attention layers."""

from types import SimpleNamespace

import torch


class DeepseekV4Attention:
    """What dsv4-vllm reads of a layer."""

    use_fp8_ds_mla_layout = True

    def __init__(self, vllm_config, prefix, topk_indices_buffer=None, aux_stream_list=None):
        config = vllm_config.model_config.hf_config
        self.prefix = prefix
        self.padded_heads = self.get_padded_num_q_heads(config.num_attention_heads)
        self.attn_sink = torch.nn.Parameter(torch.zeros(self.padded_heads), requires_grad=False)
        self.rotary_emb = SimpleNamespace(cos_sin_cache=torch.zeros(8, config.qk_rope_head_dim))
        self.topk_indices_buffer = topk_indices_buffer
        self.swa_cache_layer = SimpleNamespace(prefix=f"{prefix}.swa_cache", kv_cache=None)
        self.compressor = None
        self.kv_cache = None

    @classmethod
    def get_padded_num_q_heads(cls, num_heads):
        """Heads of q."""
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        """Its pages, where it has entries."""
        if self.compressor is None:
            return None
        return SimpleNamespace(block_size=vllm_config.cache_config.block_size)

    def forward_mqa(self, q, kv, positions, output):
        """Attend."""
        raise NotImplementedError
