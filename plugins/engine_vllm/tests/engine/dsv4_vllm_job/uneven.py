"""One rank that lacks what the others have, as on a machine where the packages differ."""

from __future__ import annotations

import os
from typing import Any


def install(backend: str) -> None:
    """Disable a backend on rank 1 alone, just before it selects."""
    from dsv4_vllm import choice
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    choose = choice._choose

    def choose_without(vllm_config: Any, base: Any) -> choice.Choice:
        if get_tensor_model_parallel_rank() == 1:
            os.environ["DSV4_DISABLE"] = backend
        return choose(vllm_config, base)

    choice._choose = choose_without
