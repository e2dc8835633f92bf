"""One step's batch: lengths, block tables, slots, and the persistent buffers they live in.

What plans workspaces needs no torch and is imported at once; the rest is imported when it is first used, so
that selection stays torch-free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsv4core.step.gather import GatherChunk, gather_area, gathered_tokens, plan_gather

if TYPE_CHECKING:
    from dsv4core.step.batch import Batch, check_batch, check_lengths, leading_decodes
    from dsv4core.step.buffers import StepBuffers
    from dsv4core.step.slots import entry_slot_mapping, slot_mapping, state_slot_mapping

_LAZY = {
    "Batch": "batch",
    "check_batch": "batch",
    "check_lengths": "batch",
    "leading_decodes": "batch",
    "StepBuffers": "buffers",
    "entry_slot_mapping": "slots",
    "slot_mapping": "slots",
    "state_slot_mapping": "slots",
}

__all__ = [
    "Batch",
    "GatherChunk",
    "StepBuffers",
    "check_batch",
    "check_lengths",
    "entry_slot_mapping",
    "gather_area",
    "gathered_tokens",
    "leading_decodes",
    "plan_gather",
    "slot_mapping",
    "state_slot_mapping",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
