"""Slots of the window, of chosen entries, and FlashInfer's table of both. -1 names nothing."""

from __future__ import annotations

import torch

from dsv4core.api.kvcache import round_up
from dsv4core.step.slots import slot_mapping


def window_slots(
    positions: torch.Tensor,
    token_to_request: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    window: int,
) -> torch.Tensor:
    """Slots of the last `window` tokens up to each query, oldest first.

    Args:
        positions: `[tokens]` int64; negative for a padding row, which gets no slot.
        token_to_request: `[tokens]` row of the block table.
        block_table: `[requests, pages]` int32.
        page_size: Rows a page of the window cache.
        window: Tokens that a query sees, its own included.

    Returns:
        `[tokens, window]` int32.
    """
    first = (positions - window + 1).clamp_min(0)
    seen = first[:, None] + torch.arange(window, device=positions.device)
    seen = torch.where(seen <= positions[:, None], seen, -1)
    requests = token_to_request.long()[:, None].expand_as(seen)
    return slot_mapping(block_table, requests, seen, page_size).int()


def query_lengths(
    positions: torch.Tensor, window: int, ratio: int | None = None, most: int = 0
) -> tuple[torch.Tensor, ...]:
    """How much each query sees and attends.

    Args:
        positions: `[tokens]` int64; negative for a padding row, which sees nothing.
        window: Tokens that a query attends at most, its own included.
        ratio: Tokens of an entry; None without any.
        most: Entries that a query attends at most.

    Returns:
        `[tokens]` int32 each: tokens of the window; with a ratio also entries that are seen, and entries that
        are attended.
    """
    seen = (positions + 1).clamp_min(0)
    if ratio is None:
        return (seen.clamp_max(window).int(),)
    entries = seen // ratio
    return seen.clamp_max(window).int(), entries.int(), entries.clamp_max(most).int()


def visible_entries(visible: torch.Tensor, width: int) -> torch.Tensor:
    """All entries that each query sees: `0 … visible - 1`, then -1.

    Args:
        visible: `[tokens]` number of entries, from the front.
        width: Columns of the table; at least the largest of `visible`.

    Returns:
        `[tokens, width]` int32 request-local entry numbers.
    """
    entry = torch.arange(width, device=visible.device, dtype=torch.int32)
    return torch.where(entry < visible[:, None], entry, -1)


def entry_slots(
    selected: torch.Tensor, token_to_request: torch.Tensor, block_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Slots of request-local entries in the compressed pool.

    Args:
        selected: `[tokens, k]` int32 entry numbers, -1 for none.
        token_to_request: `[tokens]` row of the block table; out of range gives -1.
        block_table: `[requests, pages]` int32; a column out of range gives -1.
        page_size: Entries a page.

    Returns:
        `[tokens, k]` int32.
    """
    known = ((token_to_request >= 0) & (token_to_request < block_table.shape[0]))[:, None]
    requests = torch.where(known, token_to_request.long()[:, None], 0).expand_as(selected)
    return slot_mapping(block_table, requests, torch.where(known, selected, -1).long(), page_size).int()


def visible_slots(
    visible: torch.Tensor,
    token_to_request: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    width: int,
) -> torch.Tensor:
    """Slots of all entries that each query sees, in their order.

    Args:
        visible: `[tokens]` number of entries, from the front.
        token_to_request: `[tokens]` row of the block table; out of range gives -1.
        block_table: `[requests, pages]` int32; a column out of range gives -1.
        page_size: Entries a page.
        width: Columns of the result; at least the largest of `visible`.

    Returns:
        `[tokens, width]` int32.
    """
    return entry_slots(visible_entries(visible, width), token_to_request, block_table, page_size)


def gathered_indices(
    selected: torch.Tensor | None,
    positions: torch.Tensor,
    token_to_request: torch.Tensor,
    first_token: torch.Tensor,
    entries: int,
    rows: int,
    window: int,
    visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a workspace that holds each request's entries, then its window tokens.

    Args:
        selected: `[tokens, k]` int32 request-local entries, valid ones first, then -1; None for all that
            are visible.
        positions: `[tokens]` int64.
        token_to_request: `[tokens]` request within the workspace.
        first_token: `[requests]` position of each request's first gathered window token.
        entries: Rows for entries at the front of each request.
        rows: Rows of each request.
        window: Tokens that a query sees, its own included.
        visible: `[tokens]` entries that each query sees, from the front; None without a compressor.

    Returns:
        `[tokens, round_up(k + window, 128)]` int32, entries first, then window tokens, without a gap, -1 at
        the tail; and `[tokens]` int32 lengths. `k` is `entries` where all visible ones are attended. 128
        suits FlashMLA's prefill at 64 and at 128 heads.
    """
    request = token_to_request.long()[:, None]
    if selected is None:
        none = torch.zeros_like(positions)
        selected = visible_entries(none if visible is None else visible, 0 if visible is None else entries)
    seen = positions[:, None] - torch.arange(window - 1, -1, -1, device=positions.device)
    local = torch.where(seen >= 0, entries + seen - first_token.long()[request.flatten(), None], -1)
    local = torch.cat([selected.long(), local], dim=1)
    table = torch.where(local >= 0, local + rows * request, -1)
    order = (table < 0).int().argsort(dim=-1, stable=True)  # valid ones to the front, in their order
    width = round_up(table.shape[1], 128)
    table = torch.nn.functional.pad(table.gather(1, order), (0, width - table.shape[1]), value=-1)
    return table.int(), (table >= 0).sum(-1, dtype=torch.int32)


def mixed_sparse_indices(
    window: torch.Tensor,
    compressed: torch.Tensor | None,
    window_page: tuple[int, int],
    compressed_page: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashInfer's table for TRTLLM-gen: window columns first, then compressed ones, in two separate pools.

    Rows are a multiple of 16 bytes, because the kernel loads them 128 bits at a time. The kernel masks window
    columns by the sequence length itself, so all of them count.

    Args:
        window: `[tokens, window]` int32 slots, from `window_slots`.
        compressed: `[tokens, k]` int32 slots, from `entry_slots`; None without a compressor.
        window_page: Rows a page of the window pool, and rows from one page to the next (its span).
        compressed_page: The same of the compressed pool.

    Returns:
        `[tokens, window + round_up(k, 4)]` int32 storage rows, and `[tokens]` int32 lengths: the window's
        width plus the number of valid compressed columns.
    """
    width = window.shape[1]
    if compressed is None:
        compressed = window.new_empty(window.shape[0], 0)
    padding = round_up(compressed.shape[1], 4) - compressed.shape[1]
    compressed = torch.nn.functional.pad(compressed, (0, padding), value=-1)
    lengths = width + (compressed >= 0).sum(-1, dtype=torch.int32)
    table = torch.cat([_spanned(window, *window_page), _spanned(compressed, *compressed_page)], dim=1)
    return table, lengths


def _spanned(slots: torch.Tensor, page_size: int, span: int) -> torch.Tensor:
    """Slots of tight pages as rows of a pool whose pages are `span` rows apart."""
    return torch.where(slots >= 0, slots // page_size * span + slots % page_size, -1)
