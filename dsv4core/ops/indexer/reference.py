"""Scores of all visible entries, and an exact top-k of them (DeepSeek-V4 technical report, CSA)."""

from __future__ import annotations

import torch

from dsv4core.api.errors import ConfigError
from dsv4core.api.step import CacheTable
from dsv4core.fp8 import MIN_AMAX, power_of_two_exponent, to_fp8
from dsv4core.kvcache import KVCache
from dsv4core.model.rope import rotate
from dsv4core.step.slots import slot_mapping

TILE_SCORES = 1 << 23  # elements of a tile's [tokens, heads, entries] scores: 32 MB


def index_query(
    q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor, index_dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the indexer's queries, bring them into the index cache's precision, fold scales into weights.

    Args:
        q: `[tokens, index_n_heads, index_head_dim]`.
        weights: `[tokens, index_n_heads]`, from `weights_proj`.
        positions: `[tokens]` int64.
        rope: `[max_positions, rope_dim]` fp32, of the layer's kind.
        index_dtype: `fp8` (one power-of-two scale a head), `bf16` or `fp32`.

    Returns:
        q of that precision and shape, and fp32 weights that include q's scale, `index_head_dim ** -0.5` and
        `index_n_heads ** -0.5`.
    """
    heads, width = q.shape[1:]
    rotated = rotate(q.float(), positions, rope)
    folded = weights.float()
    if index_dtype == "fp8":
        rounded = rotated.bfloat16().float()
        exponent = power_of_two_exponent(rounded.abs().amax(-1).clamp_min(MIN_AMAX))
        rotated = to_fp8(torch.ldexp(rounded, -exponent.unsqueeze(-1)))
        folded = torch.ldexp(folded, exponent)
    elif index_dtype == "bf16":
        rotated = rotated.bfloat16()
    elif index_dtype != "fp32":
        raise ConfigError(f"index_dtype={index_dtype} has no query precision here; use fp8, bf16 or fp32.")
    return rotated, folded * width**-0.5 * heads**-0.5


def index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: KVCache,
    table: CacheTable,
    token_to_request: torch.Tensor,
    visible: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """`sum over heads of weight * relu(q · key)` for every entry that a query sees.

    Args:
        q: `[tokens, heads, width]`, from `index_query`.
        weights: `[tokens, heads]` fp32.
        keys: The index cache.
        table: Where its rows lie; only the block table is used.
        token_to_request: `[tokens]` row of the block table.
        visible: `[tokens]` entries that each query sees, from the front.
        width: Columns of the result, at least the largest of `visible`.

    Returns:
        `[tokens, width]` fp32 by request-local entry number; what lies behind a query's entries is not meant
        to be read.
    """
    logits = torch.full((q.shape[0], width), float("-inf"), device=q.device)
    start = 0
    for request, tokens in _runs(token_to_request):
        rows = slice(start, start + tokens)
        start += tokens
        count = int(visible[rows].max())
        if count == 0:
            continue
        entry = torch.arange(count, device=q.device)
        slots = slot_mapping(table.block_table, torch.full_like(entry, request), entry, table.page_size)
        # An engine's rows of padding may name requests whose pages are gone; nobody looks at their scores.
        read, tile = keys.read(slots.clamp_min(0)).T, max(1, TILE_SCORES // (q.shape[1] * count))
        for own in torch.arange(rows.start, rows.stop, device=q.device).split(tile):
            score = (q[own].float() @ read).relu_()
            logits[own, :count] = (weights[own, None] @ score).squeeze(1)
    return logits


def _runs(requests: torch.Tensor) -> list[tuple[int, int]]:
    """Each request with its number of tokens; the tokens of a request lie side by side."""
    values, counts = requests.unique_consecutive(return_counts=True)
    return list(zip(values.tolist(), counts.tolist(), strict=True))


def index_topk(logits: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """The `k` best of the entries that each query sees, exactly; ties go to the lowest entry.

    NaN and minus infinity are never chosen.

    Args:
        logits: `[tokens, entries]` fp32.
        visible: `[tokens]` entries that each query sees, from the front. Behind them lies anything.
        k: Entries to choose.

    Returns:
        `[tokens, k]` int32 in ascending order of entry, -1 behind the last one.
    """
    tokens, entries = logits.shape
    selected = torch.full((tokens, k), -1, dtype=torch.int32, device=logits.device)
    if entries == 0 or tokens == 0:
        return selected
    hidden = torch.arange(entries, device=logits.device) >= visible[:, None]
    logits = logits.masked_fill(hidden | logits.isnan(), float("-inf"))
    threshold = logits.topk(min(k, entries), dim=-1).values[:, -1:]
    above, equal = logits > threshold, logits == threshold
    room = min(k, entries) - above.sum(-1, keepdim=True)
    chosen = (above | (equal & (equal.cumsum(-1) <= room))) & (logits > float("-inf"))
    row, entry = chosen.nonzero(as_tuple=True)
    selected[row, chosen.cumsum(-1)[row, entry] - 1] = entry.int()
    return selected
