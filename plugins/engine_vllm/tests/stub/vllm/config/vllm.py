"""All of the configuration."""


class VllmConfig:
    """What dsv4-vllm reads of it."""

    additional_config: object = None
    model_config: object = None
    cache_config: object = None
    scheduler_config: object = None
    parallel_config: object = None
    compilation_config: object = None
    speculative_config: object = None
