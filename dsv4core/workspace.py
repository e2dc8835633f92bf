"""Temporary memory of the core's operations, for plans that are made without torch."""

from __future__ import annotations

QUERY_TILE = 64
"""Queries that share the reading of their cached rows in the reference's attention."""

MOST_SHARED = 4
"""A tile reads at most this many times the rows of one query, else it is halved."""


def sparse_mla_bytes(width: int, heads: int, head_dim: int) -> int:
    """A bound on what the reference's attention holds at a time besides its output.

    A tile's rows as bytes and as fp32; its scores, with the sink, and as weights; its counts.

    Args:
        width: Rows that one query attends.
        heads: Query heads of this rank.
        head_dim: Elements of a row.
    """
    rows = MOST_SHARED * width
    return 4 * rows * (2 * head_dim + QUERY_TILE * (3 * heads + 3))
