"""Temporary memory of the core's operations, for plans that are made without torch."""

from __future__ import annotations

from dsv4core.api.layer import LayerSpec
from dsv4core.api.selection import Limits

QUERY_TILE = 64
"""Queries that share the reading of their cached rows in the reference's attention."""

MOST_SHARED = 4
"""A tile reads at most this many times the rows of one query, else it is halved."""

MOST_PARTS = 512
"""Programs of a product whose sums are added, at most: fewer than twice as many as are wanted."""

MOST_PROGRAMS = 640
"""Most programs of 64 heads that share sums of parts: as many as a GPU has processors, or twice that."""

LOGITS = 1 << 26
"""Scores that an indexer has at a time: 256 MB. A long prefill chooses for its queries in several turns."""

CHUNK = 16384
"""Scores that one program of the top-k looks at, at most."""


def chunk_size(k: int) -> int:
    """Scores of which one program of the top-k keeps `k`: 8 k or more, from 4,096 to `CHUNK`."""
    return min(max(8 << (k - 1).bit_length(), 4096), CHUNK)


def layer_bytes(layer: LayerSpec, limits: Limits) -> int:
    """A bound on what the definitions of a layer's hooks hold at a time besides what they return.

    Args:
        layer: The layer.
        limits: The largest step.
    """
    model, kind = layer.model, layer.kind
    entries = kind.visible_entries(limits.max_model_len)
    if kind.select == "top_k":
        entries = min(model.index_topk, entries)
    width = model.sliding_window + entries
    attention = sparse_mla_bytes(width, layer.num_heads, model.head_dim)
    return max(attention, table_bytes(width, limits.max_tokens), o_proj_bytes(layer, limits.max_tokens))


def kernel_bytes(layer: LayerSpec, limits: Limits) -> int:
    """A bound on what the Triton kernels of a layer's hooks hold at a time besides what they return.

    The step's tables of slots and of work, and the most of these. Attention: the slots of entries, and sums
    of parts. Compressor: pooled rows. Top-k: the best of each chunk, twice. Output projection: heads rotated
    back; low-rank rows; sums of parts, or weights as activations.

    Args:
        layer: The layer.
        limits: The largest step.
    """
    model, tokens = layer.model, limits.max_tokens
    heads = layer.num_heads * model.head_dim
    low_rank = layer.num_groups * model.o_lora_rank
    entries = layer.kind.visible_entries(limits.max_model_len)
    chosen = min(model.index_topk, entries)
    attention = 4 * tokens * chosen + 4 * MOST_PROGRAMS * 64 * (model.head_dim + 1)
    turn = min(tokens, LOGITS // max(entries, 1) + 1)
    size = chunk_size(max(chosen, 1))
    narrowed = 2 * 8 * turn * chosen * -(-entries // size) if entries > size else 0
    tables = tokens * (model.sliding_window + 6) + limits.max_requests * (entries + 18) + MOST_PROGRAMS
    parts = 4 * MOST_PARTS * 128 * 128
    weights = 4 * max(low_rank * heads // layer.num_groups, low_rank * model.hidden_size)
    projection = tokens * (4 * heads + 6 * low_rank + 4 * model.hidden_size) + max(parts, weights)
    return 4 * tables + max(attention, 4 * tokens * model.head_dim, narrowed, projection)


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


def table_bytes(width: int, tokens: int) -> int:
    """A bound on what making a table of slots holds: numbers, pages and masks of all its places.

    Args:
        width: Columns of the table.
        tokens: Its rows.
    """
    return 8 * 8 * width * tokens


def o_proj_bytes(layer: LayerSpec, tokens: int) -> int:
    """A bound on what the output projection's definition holds at a time besides its output.

    The heads rotated back, as fp32 and in groups; the low-rank rows, twice as fp32 and in two dtypes.

    Args:
        layer: The layer.
        tokens: Query tokens.
    """
    heads = layer.num_heads * layer.model.head_dim
    low_rank = layer.num_groups * layer.model.o_lora_rank
    return 4 * tokens * (3 * heads + 4 * low_rank + layer.model.hidden_size)
