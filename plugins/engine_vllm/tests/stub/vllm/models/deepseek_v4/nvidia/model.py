"""The model on CUDA."""

from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention


def _select_dsv4_attn_cls(vllm_config):
    return DeepseekV4FlashMLAAttention


def make_layer(vllm_config, prefix, **keywords):
    """As the decoder layer makes its attention."""
    return _select_dsv4_attn_cls(vllm_config)(vllm_config, prefix=prefix, **keywords)
