"""One step's batch: lengths, block tables, slots, and the persistent buffers they live in."""

from dsv4core.step.batch import Batch, check_batch, check_lengths, leading_decodes
from dsv4core.step.buffers import StepBuffers
from dsv4core.step.gather import GatherChunk, gather_area, gathered_tokens, plan_gather
from dsv4core.step.slots import entry_slot_mapping, slot_mapping, state_slot_mapping

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
