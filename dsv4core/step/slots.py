"""Which slot each token writes in which cache. -1 writes nothing."""

from __future__ import annotations

import torch

from dsv4core.api.model import LayerKind


def slot_mapping(
    block_table: torch.Tensor, requests: torch.Tensor, rows: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Slots of rows of requests.

    Args:
        block_table: `[requests, pages]` int32, negative where there is no page.
        requests: `[n]` row of the block table.
        rows: `[n]` row number within the request, negative for none.
        page_size: Rows a page.

    Returns:
        `[n]` int64, -1 where `rows` is negative, beyond the table, or has no page.
    """
    inside = (rows >= 0) & (rows < block_table.shape[1] * page_size)
    known = torch.where(inside, rows, 0)
    page = block_table[requests, known // page_size].long()
    return torch.where(inside & (page >= 0), page * page_size + known % page_size, -1)


def entry_slot_mapping(
    block_table: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    kind: LayerKind,
    page_size: int,
) -> torch.Tensor:
    """Slots of the compressed entries that tokens complete; -1 for tokens that complete none.

    A token completes entry `position // ratio` when it is the last of its group.
    """
    assert kind.ratio is not None
    completes = (positions + 1) % kind.ratio == 0
    return slot_mapping(block_table, requests, torch.where(completes, positions // kind.ratio, -1), page_size)


def state_slot_mapping(
    block_table: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    kept: int,
    page_size: int,
) -> torch.Tensor:
    """Slots of the compressor states of each request's last `kept` tokens; -1 for older ones.

    A state cache holds a constant number of rows a request, so that a long chunk needs no more of it.
    """
    recent = positions >= seq_lens[requests] - kept
    return slot_mapping(block_table, requests, torch.where(recent, positions, -1), page_size)
