"""A platform's attention."""

from vllm.models.deepseek_v4.attention import DeepseekV4Attention


class DeepseekV4ROCMAiterMLAAttention(DeepseekV4Attention):
    """vLLM's own layer."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self._wo_a_fp8_weight = None

    @classmethod
    def get_padded_num_q_heads(cls, num_heads):
        """No padding."""
        return num_heads

    def forward_mqa(self, q, kv, positions, output):
        """Say who was asked."""
        raise AssertionError("vLLM's own attention ran")
