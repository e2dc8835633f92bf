"""Decode consecutive rows of each request's cache into a workspace."""

from __future__ import annotations

import torch

from dsv4core.kvcache import KVCache


def gather_rows(
    cache: KVCache,
    block_table: torch.Tensor,
    first: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Decode rows `first … first + count - 1` of each request.

    Args:
        cache: The pool.
        block_table: `[requests, pages]` int32: physical page of each logical page, negative for none.
        first: `[requests]`: number of the first row wanted, not negative.
        count: `[requests]`: how many, at most `height`.
        out: `[requests, height, width]` of the workspace, bf16 or fp32: bf16 holds every packed row. Requests
            and rows may be apart. Rows behind a request's count, and those of pages that there are not, are
            left as they are.
    """
    for request in range(block_table.shape[0]):
        number = first[request] + torch.arange(int(count[request]), device=first.device)
        place = number // cache.page_size
        known = place < block_table.shape[1]
        page = torch.where(known, block_table[request, place.clamp_max(block_table.shape[1] - 1)], -1)
        slots = page * cache.page_size + number % cache.page_size
        out[request, : len(number)][page >= 0] = cache.read(slots[page >= 0]).to(out.dtype)
