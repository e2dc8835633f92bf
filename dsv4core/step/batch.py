"""A step as its host describes it: lengths and block tables, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dsv4core.api.errors import CacheError
from dsv4core.api.selection import Limits


@dataclass(frozen=True)
class Batch:
    """What a step computes. Decode requests come first.

    Attributes:
        computed: Tokens of each request whose keys are cached already.
        query: Query tokens of each request in this step; may be 0.
        num_decode_requests: Requests at the front that are decodes.
        window: `[requests, pages]` int32 block table of the window caches.
        context: The same of compressed entries and index keys.
        state: The same of compressor states, by layer kind's name.
    """

    computed: tuple[int, ...]
    query: tuple[int, ...]
    num_decode_requests: int
    window: torch.Tensor
    context: torch.Tensor
    state: Mapping[str, torch.Tensor]

    @property
    def total(self) -> tuple[int, ...]:
        """Tokens of each request after the step."""
        return tuple(c + q for c, q in zip(self.computed, self.query, strict=True))


def leading_decodes(computed: tuple[int, ...], query: tuple[int, ...], decode_query_len: int) -> int:
    """Requests at the front that have at most `decode_query_len` query tokens and something computed."""
    count = 0
    for known, new in zip(computed, query, strict=True):
        if known == 0 or new > decode_query_len:
            break
        count += 1
    return count


def check_batch(batch: Batch, limits: Limits) -> None:
    """Check a batch against the limits that buffers were made for.

    Raises:
        CacheError: A length is negative or exceeds a limit, or a table has not one row a request.
    """
    requests = len(batch.query)
    rows = {"window": batch.window, "context": batch.context, **batch.state}
    for name, table in rows.items():
        if table.shape[0] != requests or len(batch.computed) != requests:
            raise CacheError(
                f"the step has {requests} query lengths, {len(batch.computed)} computed lengths and "
                f"{table.shape[0]} rows in the {name} block table; pass one of each for every request."
            )
    if min(batch.query + batch.computed, default=0) < 0:
        raise CacheError(f"lengths cannot be negative: query {batch.query}, computed {batch.computed}.")
    measured = {
        "max_requests": (requests, limits.max_requests, "requests"),
        "max_tokens": (sum(batch.query), limits.max_tokens, "query tokens"),
        "max_query_len": (max(batch.query, default=0), limits.max_query_len, "query tokens of one request"),
        "max_model_len": (max(batch.total, default=0), limits.max_model_len, "tokens in one request"),
    }
    for name, (found, most, what) in measured.items():
        if found > most:
            raise CacheError(f"the step has {found} {what}, and {name} is {most}; split it or raise {name}.")
