"""Which requests of a prefill are gathered together into a bounded workspace of decoded rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsv4core.api.model import LayerKind
from dsv4core.api.selection import Limits

WORST_REQUESTS = 4  # requests of the worst case that fit the workspace together


@dataclass(frozen=True)
class GatherChunk:
    """Requests `first … end - 1`, gathered side by side.

    Attributes:
        entries: Rows for compressed entries of each request, at its front.
        rows: Rows of each request: entries, then its window tokens.
    """

    first: int
    end: int
    entries: int
    rows: int


def gathered_tokens(query: int, total: int, window: int) -> int:
    """Window tokens that a request's queries look at: their own, and up to `window - 1` before them."""
    return query + min(total - query, window - 1)


def gather_area(kind: LayerKind, limits: Limits, window: int) -> int:
    """Rows of the workspace: what `WORST_REQUESTS` requests of the largest size take."""
    entries = 0 if kind.ratio is None else -(-limits.max_model_len // kind.ratio)
    return WORST_REQUESTS * (entries + window + limits.max_tokens)


def plan_gather(
    query: Sequence[int], total: Sequence[int], kind: LayerKind, window: int, area: int
) -> Iterator[GatherChunk]:
    """Cut requests into chunks whose rows fit `area`; a request too large for it is a chunk all the same.

    Args:
        query: Query tokens of each request.
        total: Tokens of each request with this step's included.
        kind: The layers' kind.
        window: Raw tokens that a query sees.
        area: Rows of the workspace, from `gather_area`.
    """
    first = entries = tokens = 0
    for request, (new, length) in enumerate(zip(query, total, strict=True)):
        more_entries = max(entries, kind.visible_entries(length))
        more_tokens = max(tokens, gathered_tokens(new, length, window))
        if request > first and (request + 1 - first) * (more_entries + more_tokens) > area:
            yield GatherChunk(first, request, entries, entries + tokens)
            first = request
            more_entries, more_tokens = kind.visible_entries(length), gathered_tokens(new, length, window)
        entries, tokens = more_entries, more_tokens
    if len(query) > first:
        yield GatherChunk(first, len(query), entries, entries + tokens)
