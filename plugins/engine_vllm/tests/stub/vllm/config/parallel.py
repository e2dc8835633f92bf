"""Ranks."""


class ParallelConfig:
    """What dsv4-vllm reads of it."""

    decode_context_parallel_size: object = None

    def use_ubatching(self):
        """Asked of it."""
