"""The scheduler."""


class SchedulerConfig:
    """What dsv4-vllm reads of it."""

    max_num_batched_tokens: object = None
    max_num_seqs: object = None
