"""Gated pooling of a group of tokens into one cached entry (DeepSeek-V4 technical report, CSA and HCA)."""

from __future__ import annotations

import torch

from dsv4core.api.model import LayerKind
from dsv4core.api.step import CacheTable, Step
from dsv4core.kvcache import KVCache
from dsv4core.model.rope import rotate
from dsv4core.ops.norm import rms_norm
from dsv4core.step.slots import slot_mapping


def compress(
    projected: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    rope: torch.Tensor,
    eps: float,
    kind: LayerKind,
    step: Step,
    state: KVCache,
    entries: KVCache,
) -> None:
    """Store this step's compressor states, and the entries that it completes.

    The last token of a group of `ratio` completes an entry: per channel, a softmax over the scores of the
    group's tokens (with overlap: those of the group before, too) weighs their values; the pooled row is
    normalised, rotated at the position of the group's first token, and stored. With overlap a token gives the
    second half of its channels to its own group and the first half to the next one.

    Args:
        projected: `[tokens, 2 * groups * width]` fp32: values, then scores.
        ape: `[ratio, groups * width]` fp32, added to the score by `position % ratio`.
        norm_weight: `[width]`.
        rope: `[max_positions, rope_dim]` fp32.
        eps: Of the norm.
        kind: The layer's kind.
        step: The step; `step.state` and `step.compressed` of this kind say where rows lie.
        state: State cache, rows of values and scores. Read before it is written: its rows are those of
            earlier steps.
        entries: The compressed or index cache.
    """
    assert kind.ratio is not None
    values, scores = projected.float().chunk(2, dim=-1)
    scores = scores + ape.float()[step.positions % kind.ratio]
    entry_slots = step.compressed[kind.name].slot_mapping
    ends = torch.nonzero(entry_slots >= 0).flatten()
    if ends.numel():
        pooled = _pool(values, scores, ends, kind, step, state)
        first = step.positions[ends] // kind.ratio * kind.ratio
        entries.write(entry_slots[ends], rotate(rms_norm(pooled, norm_weight, eps), first, rope))
    state.write(step.state[kind.name].slot_mapping, torch.cat([values, scores], dim=-1))


def _pool(
    values: torch.Tensor,
    scores: torch.Tensor,
    ends: torch.Tensor,
    kind: LayerKind,
    step: Step,
    state: KVCache,
) -> torch.Tensor:
    """The pooled rows `[entries, width]` of the groups that end at the tokens `ends`."""
    assert kind.ratio is not None
    rows, width = kind.state_window, values.shape[1] // kind.groups
    back = torch.arange(rows - 1, -1, -1, device=ends.device)  # oldest row first
    position = step.positions[ends, None] - back
    request = step.token_to_request[ends].long()
    token = ends[:, None] - back
    in_step = token >= step.query_start_loc[request, None]
    half = torch.arange(rows, device=ends.device) // kind.ratio  # 0: the group before, 1: its own

    def gather(source: torch.Tensor) -> torch.Tensor:
        return source.unflatten(-1, (kind.groups, width))[token.clamp_min(0), half]

    window_values, window_scores = gather(values), gather(scores)
    cached = ~in_step & (position >= 0)
    if cached.any():
        which, row = cached.nonzero(as_tuple=True)
        read = _cached_rows(step.state[kind.name], request[which], position[which, row], state)
        read_values, read_scores = (part.unflatten(-1, (kind.groups, width)) for part in read.chunk(2, -1))
        picked = torch.arange(which.shape[0], device=which.device)
        window_values[which, row] = read_values[picked, half[row]]
        window_scores[which, row] = read_scores[picked, half[row]]
    nothing = (position < 0).unsqueeze(-1)
    window_scores = window_scores.masked_fill(nothing, float("-inf"))
    # Written out, because torch's softmax rounds a row differently in another batch (seen with AVX-512).
    weights = (window_scores - window_scores.amax(dim=1, keepdim=True)).exp()
    return (weights * window_values.masked_fill(nothing, 0.0)).sum(dim=1) / weights.sum(dim=1)


def _cached_rows(
    table: CacheTable, request: torch.Tensor, position: torch.Tensor, state: KVCache
) -> torch.Tensor:
    return state.read(slot_mapping(table.block_table, request, position, table.page_size))
