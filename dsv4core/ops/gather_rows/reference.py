"""Decode consecutive rows of each request's cache into a workspace."""

from __future__ import annotations

import torch

from dsv4core.kvcache import KVCache


def gather_rows(
    cache: KVCache,
    block_table: torch.Tensor,
    first: torch.Tensor,
    count: torch.Tensor,
    height: int,
    width: int,
    dtype: torch.dtype,
    rows: int | None = None,
) -> torch.Tensor:
    """Decode rows `first … first + count - 1` of each request.

    Args:
        cache: The pool.
        block_table: `[requests, pages]` int32: physical page of each logical page, negative for none.
        first: `[requests]`: number of the first row wanted, not negative.
        count: `[requests]`: how many, at most `height`.
        height: Rows of the workspace for each request.
        width: Values of a row.
        dtype: Of the workspace: bf16 holds every packed row.
        rows: Rows of the workspace, if they are more than `requests * height`.

    Returns:
        `[rows, width]`, `height` of each request side by side. Rows behind a request's count, and those of
        pages that there are not, may be anything.
    """
    requests = block_table.shape[0]
    size = (rows or requests * height, width)
    out = torch.full(size, float("nan"), dtype=dtype, device=first.device)
    for request in range(requests):
        number = first[request] + torch.arange(int(count[request]), device=first.device)
        place = number // cache.page_size
        known = place < block_table.shape[1]
        page = torch.where(known, block_table[request, place.clamp_max(block_table.shape[1] - 1)], -1)
        slots = page * cache.page_size + number % cache.page_size
        places = (request * height + torch.arange(len(number), device=first.device))[page >= 0]
        out[places] = cache.read(slots[page >= 0]).to(dtype)
    return out
