"""The rows that queries attend, without those that are none."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class RaggedLists:
    """Lists in buffers that keep their addresses.

    Attributes:
        indices: `[room]` int32 rows, list behind list; behind the last one lies anything.
        starts: `[tokens + 1]` int32: where each list begins, and the last one ends.
    """

    indices: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, width: int, device: torch.device) -> RaggedLists:
        """Room for so many lists of at most `width` rows."""
        return cls(
            torch.empty(tokens * max(width, 1), dtype=torch.int32, device=device),
            torch.zeros(tokens + 1, dtype=torch.int32, device=device),
        )

    def of(self, tokens: slice) -> RaggedLists:
        """Those of some queries, in the same memory."""
        begin, end, _ = tokens.indices(len(self.starts) - 1)
        return RaggedLists(self.indices, self.starts[begin : end + 1])


def ragged_lists(
    slots: torch.Tensor,
    lengths: torch.Tensor | None,
    table_rows: torch.Tensor | None,
    least: int,
    lists: RaggedLists,
) -> RaggedLists:
    """Write the valid slots of each query, in their order.

    A kernel without a check of sentinels needs every row valid; one that leaves the output of an empty list
    unwritten needs one row at least, -1.

    Args:
        slots: `[rows, width]` int32, negative for nothing, wherever it stands.
        lengths: `[tokens]`: columns from the front that count; None if all do.
        table_rows: `[tokens]`: each query's row of `slots`; out of range for none. None if it is its own.
        least: 1: an empty list becomes a -1; 0: it stays empty.
        lists: Room for them.

    Returns:
        The lists of these queries, in the memory of `lists`.
    """
    named = slots
    if table_rows is not None:
        known = (table_rows >= 0) & (table_rows < len(slots))
        named = torch.where(known[:, None], slots[table_rows.clamp(0, max(len(slots) - 1, 0)).long()], -1)
    valid = named >= 0
    if lengths is not None:
        valid &= torch.arange(named.shape[1], device=named.device) < lengths[:, None]
    starts = lists.starts[: len(named) + 1]
    counts = valid.sum(1)
    starts[1:] = counts.clamp_min(least).cumsum(0)
    place = starts[:-1, None] + valid.cumsum(1) - 1
    lists.indices[place[valid].long()] = named[valid]
    if least:
        lists.indices[starts[:-1][counts == 0].long()] = -1
    return RaggedLists(lists.indices, starts)
