"""One rank that lacks what the others have, as on a machine where the packages differ."""

from __future__ import annotations

import os
from typing import Any


def install(backend: str, seconds: str) -> None:
    """Let rank 1 differ from the others.

    Args:
        backend: Disabled on rank 1 just before it selects; empty for none.
        seconds: Rank 1 has no adapter, and the others wait so long for it; empty where it has one.
    """
    from dsv4_vllm import choice, seams
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    choose, ours = choice._choose, seams._ours

    def choose_without(*arguments: Any) -> choice.Choice:
        if get_tensor_model_parallel_rank() == 1:
            os.environ["DSV4_DISABLE"] = backend
        return choose(*arguments)

    def not_ours(base: Any, *arguments: Any) -> Any:
        return base if get_tensor_model_parallel_rank() == 1 else ours(base, *arguments)

    if backend:
        choice._choose = choose_without
    if seconds:
        choice.WAIT = int(seconds)
        seams._ours = not_ours
        seams.OURS = "__init__"  # its guard would refuse that rank's layers
