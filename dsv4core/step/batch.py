"""A step as its host describes it: lengths and block tables, on the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from dsv4core.api.errors import CacheError
from dsv4core.api.selection import Limits


@dataclass(frozen=True, eq=False)
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


def check_lengths(computed: Sequence[int], query: Sequence[int], limits: Limits) -> None:
    """Check a step's lengths against the limits that buffers were made for.

    Raises:
        CacheError: They are not one pair a request, are negative, or exceed a limit.
    """
    if len(computed) != len(query):
        raise CacheError(
            f"the step has {len(query)} query lengths and {len(computed)} computed lengths; pass one of each "
            "for every request."
        )
    if min((*query, *computed), default=0) < 0:
        raise CacheError(f"lengths cannot be negative: query {tuple(query)}, computed {tuple(computed)}.")
    total = [known + new for known, new in zip(computed, query, strict=True)]
    measured = {
        "max_requests": (len(query), limits.max_requests, "requests"),
        "max_tokens": (sum(query), limits.max_tokens, "query tokens"),
        "max_query_len": (max(query, default=0), limits.max_query_len, "query tokens of one request"),
        "max_model_len": (max(total, default=0), limits.max_model_len, "tokens in one request"),
    }
    for name, (found, most, what) in measured.items():
        if found > most:
            raise CacheError(f"the step has {found} {what}, and {name} is {most}; split it or raise {name}.")


def check_batch(batch: Batch, limits: Limits, kinds: Collection[str]) -> None:
    """Check a batch: its lengths, its decodes, and that it has a table of every group, a row a request.

    Args:
        kinds: Names of the layer kinds that have compressor states.

    Raises:
        CacheError: With the first thing that does not fit.
    """
    check_lengths(batch.computed, batch.query, limits)
    requests, decodes = len(batch.query), batch.num_decode_requests
    if not 0 <= decodes <= requests or 0 in batch.computed[:decodes]:
        raise CacheError(
            f"num_decode_requests={decodes} of {requests} requests with computed lengths {batch.computed}: a "
            "decode has computed tokens, and decodes come first."
        )
    missing = sorted(set(kinds) - set(batch.state))
    if missing:
        raise CacheError(
            f"the step has no block table for the states of {', '.join(missing)}; pass them, too."
        )
    for name, table in {"window": batch.window, "context": batch.context, **batch.state}.items():
        if table.shape[0] != requests:
            raise CacheError(
                f"the step has {requests} requests, and the {name} block table has {table.shape[0]} rows; "
                "pass one for every request."
            )
