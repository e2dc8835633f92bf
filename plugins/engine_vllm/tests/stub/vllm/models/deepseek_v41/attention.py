"""DeepSeek-V4.1's attention, which is a class of its own."""


class DeepseekV4Attention:
    """vLLM's own layer."""

    def __init__(self, vllm_config, prefix):
        self.prefix = prefix
