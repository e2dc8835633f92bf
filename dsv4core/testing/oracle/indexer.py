"""The indexer: scores of entries, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4core.api import LayerKind, Step
from dsv4core.kvcache import KVCache
from dsv4core.testing.oracle.attention import cached_rows


def entry_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: KVCache, step: Step, kind: LayerKind
) -> list[torch.Tensor]:
    """`sum over heads of weight * max(0, q · key)` for the entries that each query sees.

    Args:
        q: `[tokens, heads, width]` in the index cache's precision.
        weights: `[tokens, heads]`.
        keys: The index cache.

    Returns:
        `[entries]` fp64 on the CPU for each token: those that are complete at its position.
    """
    assert kind.ratio is not None
    table, scores = step.compressed[kind.name].block_table, []
    requests, positions = step.token_to_request.tolist(), step.positions.tolist()
    for token, (request, position) in enumerate(zip(requests, positions, strict=True)):
        rows = cached_rows(keys, torch.arange((position + 1) // kind.ratio), table[request])
        products = q[token].float().cpu().double() @ rows.T
        scores.append(weights[token].cpu().double() @ products.clamp_min(0))
    return scores


def best_entries(scores: Sequence[float], k: int) -> list[int]:
    """Numbers of the `k` best scores; ties go to the lowest entry, NaN and minus infinity are no scores."""
    ranked = sorted((-score, number) for number, score in enumerate(scores) if score > float("-inf"))
    return sorted(number for _, number in ranked[:k])
