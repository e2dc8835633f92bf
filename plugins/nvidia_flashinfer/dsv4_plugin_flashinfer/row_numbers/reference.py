"""The rows of a query side by side: its window, oldest first, then its entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4core import ops
from dsv4core.api import CacheTable


@dataclass(frozen=True)
class Place:
    """Where a pool's rows lie, in units from the space's beginning.

    Attributes:
        first: Units in front of the pool; negative where it lies in front of the beginning.
        page: Units from one page to the next.
        row: Units from one row of a page to the next.
    """

    first: int
    page: int
    row: int


def row_numbers(
    positions: torch.Tensor,
    token_to_request: torch.Tensor,
    window: CacheTable,
    entries: CacheTable | None,
    selected: torch.Tensor | None,
    places: tuple[Place, Place],
    seen: int,
    ratio: int | None,
    planned: torch.Tensor,
    numbers: torch.Tensor,
    attends: torch.Tensor,
) -> None:
    """Write the numbers of all rows that queries attend, without gaps.

    Args:
        positions: `[tokens]` int64; negative for a padding row, which attends nothing.
        token_to_request: `[tokens]` row of the block tables; of padding rows anything.
        window: The window's block table.
        entries: That of compressed entries, or None.
        selected: `[tokens, k]` int32 request-local entries, -1 at the tail; None: all that a query sees.
        places: Of the window's rows, and of the entries'.
        seen: Tokens of a window.
        ratio: Tokens of an entry, or None.
        planned: `[1]` int32: so many tokens from the front are the step's.
        numbers: `[tokens, width]` int32, filled from the front; behind lies anything. What has no page gets
            the number of a row of its pool's first page.
        attends: `[tokens]` int32: 1 for queries of the step that have a page for their own token, else 0.
    """
    first, second = places
    attends.zero_()
    slots = ops.window_slots(positions, token_to_request, window.block_table, window.page_size, seen)
    attended = [(slots, window.page_size, first)]
    lengths = list(ops.query_lengths(positions, seen, ratio, numbers.shape[1] - seen))
    if entries is not None:
        if selected is None:
            selected = ops.visible_entries(lengths[1], numbers.shape[1] - seen)
        place = (token_to_request, entries.block_table, entries.page_size)
        attended.append((ops.entry_slots(selected, *place), entries.page_size, second))
        lengths[1] = (selected >= 0).sum(1)
    for token in range(len(positions)):
        rows = []
        for (own, page_size, where), count in zip(attended, lengths, strict=False):
            known = own[token, : int(count[token])].clamp_min(0)
            page, offset = known // page_size, known % page_size
            rows.append(where.first + page * where.page + offset * where.row)
        found = torch.cat(rows)
        numbers[token, : len(found)] = found.int()
        if token < int(planned) and lengths[0][token] > 0:
            attends[token] = int(slots[token, int(lengths[0][token]) - 1] >= 0)
