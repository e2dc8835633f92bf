"""The model."""


class ModelConfig:
    """What dsv4-vllm reads of it."""

    hf_config: object = None
    max_model_len: object = None
    dtype: object = None
