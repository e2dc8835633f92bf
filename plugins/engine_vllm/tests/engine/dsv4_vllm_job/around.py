"""Stands around the attention of the classes that the adapter makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Forward = Callable[..., None]


def around_attention(name: str, make: Callable[[Any, Any, Forward], Forward]) -> None:
    """Replace `forward_mqa` of every class that the adapter derives.

    Args:
        name: Of the replacement; the second call with one name changes nothing.
        make: `(base, host, forward_mqa)` to what takes its place.
    """
    import dsv4_vllm.attention as adapter

    if hasattr(adapter, name):
        return
    setattr(adapter, name, True)
    derive = adapter._derive

    def replaced(base: Any, host: Any) -> type:
        derived: Any = derive(base, host)
        derived.forward_mqa = make(base, host, derived.forward_mqa)
        made: type = derived
        return made

    adapter._derive = replaced
