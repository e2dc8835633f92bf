"""Groups of ranks."""

from types import SimpleNamespace

import torch


def get_tensor_model_parallel_rank():
    """This rank."""
    return 0


def get_tensor_model_parallel_world_size():
    """Ranks that share the heads."""
    return 1


def get_tp_group():
    """The group of those ranks."""
    return SimpleNamespace(world_size=1, cpu_group=torch.distributed.group.WORLD)


class GroupCoordinator:
    """What dsv4-vllm reads of a group."""

    world_size: int
    cpu_group: object
