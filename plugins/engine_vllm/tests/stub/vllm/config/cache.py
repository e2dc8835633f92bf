"""Caches."""


class CacheConfig:
    """What dsv4-vllm reads of it."""

    cache_dtype: object = None
    block_size: object = None
    user_specified_block_size: object = None
