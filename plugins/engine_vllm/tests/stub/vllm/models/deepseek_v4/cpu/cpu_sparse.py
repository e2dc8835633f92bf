"""A platform's attention."""

from vllm.models.deepseek_v4.attention import DeepseekV4Attention


class DeepseekV4CPUAttention(DeepseekV4Attention):
    """vLLM's own layer."""

    @classmethod
    def get_padded_num_q_heads(cls, num_heads):
        """No padding."""
        return num_heads

    def process_weights_after_loading(self, act_dtype):
        """Keep what it was called with."""
        self.prepared_for = act_dtype

    def forward_mqa(self, q, kv, positions, output):
        """Say who was asked."""
        raise AssertionError("vLLM's own attention ran")
