"""One step's batch: lengths, block tables, slots, and the persistent buffers they live in."""

from dsv4core.step.batch import Batch, check_batch, leading_decodes
from dsv4core.step.buffers import StepBuffers
from dsv4core.step.slots import entry_slot_mapping, slot_mapping, state_slot_mapping

__all__ = [
    "Batch",
    "StepBuffers",
    "check_batch",
    "entry_slot_mapping",
    "leading_decodes",
    "slot_mapping",
    "state_slot_mapping",
]
