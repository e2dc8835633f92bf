"""The model on a CPU."""

from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention


def make_layer(vllm_config, prefix, **keywords):
    """As the decoder layer makes its attention."""
    return DeepseekV4CPUAttention(vllm_config, prefix=prefix, **keywords)
