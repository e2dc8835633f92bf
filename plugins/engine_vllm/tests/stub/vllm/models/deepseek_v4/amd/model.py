"""The model on ROCm."""

from vllm.models.deepseek_v4.amd.rocm import DeepseekV4ROCMAiterMLAAttention


def make_layer(vllm_config, prefix, **keywords):
    """As the decoder layer makes its attention."""
    return DeepseekV4ROCMAiterMLAAttention(vllm_config, prefix=prefix, **keywords)


def is_own(module):
    """As `process_weights_after_loading` finds its layers."""
    return isinstance(module, DeepseekV4ROCMAiterMLAAttention)
