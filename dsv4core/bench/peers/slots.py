"""The rows that queries attend, as every peer takes them: slots of the pools."""

from __future__ import annotations

import torch

from dsv4core import ops
from dsv4core.bench.inputs import Inputs, Turn
from dsv4core.kvcache import KVCache


def attended_slots(inputs: Inputs, turn: Turn) -> list[tuple[KVCache, torch.Tensor]]:
    """The pools that a turn's queries read, each with slots `[tokens, k]` int32, -1 for none."""
    step, model, caches = turn.step, inputs.spec.model, inputs.caches
    window = step.window
    found = [
        (
            caches.window,
            ops.window_slots(
                step.positions,
                step.token_to_request,
                window.block_table,
                window.page_size,
                model.sliding_window,
            ),
        )
    ]
    kind = inputs.workload.kind
    if caches.compressed is not None and kind.ratio is not None:
        entries = turn.selected
        if entries is None:
            visible = (step.positions + 1) // kind.ratio
            entries = ops.visible_entries(visible, kind.visible_entries(max(inputs.workload.total)))
        table = step.compressed[kind.name]
        slots = ops.entry_slots(entries, step.token_to_request, table.block_table, table.page_size)
        found.append((caches.compressed, slots))
    return found
