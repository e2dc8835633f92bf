"""Index tables: which slots of which pool each query attends."""

from dsv4core.ops.sparse_indices.reference import (
    entry_slots,
    gathered_indices,
    mixed_sparse_indices,
    query_lengths,
    visible_entries,
    visible_slots,
    window_slots,
)

__all__ = [
    "entry_slots",
    "gathered_indices",
    "mixed_sparse_indices",
    "query_lengths",
    "visible_entries",
    "visible_slots",
    "window_slots",
]
