"""Scores of whole prompts by a library's kernel, and those of the queries beside them by another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dsv4core.api.model import LayerKind
from dsv4core.api.step import Step
from dsv4core.kvcache import KVCache


@dataclass(frozen=True)
class Prompt:
    """Queries of one prefill.

    Attributes:
        tokens: Where they are among those that are looked at.
        request: Their request.
        entries: What the last of them sees, at least 1.
    """

    tokens: slice
    request: int
    entries: int


def prompts(step: Step, kind: LayerKind, tokens: slice, least: int) -> list[Prompt]:
    """Prefills among some of the step's tokens; none in a graph, or where the host has no lengths.

    Args:
        step: The step.
        kind: The layers' kind.
        tokens: Which of its tokens are looked at.
        least: Queries of a prefill from which on it is one of them.
    """
    captured = step.positions.is_cuda and torch.cuda.is_current_stream_capturing()
    if step.host_lengths is None or captured:
        return []
    found, begin, lengths = [], 0, step.host_lengths
    start, stop, _ = tokens.indices(step.num_tokens)
    for request, (query, total) in enumerate(zip(lengths.query, lengths.total, strict=True)):
        first, last = max(begin, start), min(begin + query, stop)
        if request >= step.num_decode_requests and last - first >= least:
            own = slice(first - start, last - start)
            seen = kind.visible_entries(total - (begin + query - last))
            found.append(Prompt(own, request, max(1, seen)))
        begin += query
    return found


def side_by_side(keys: KVCache, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The FP8 keys of some pages, one behind the other.

    Args:
        keys: The index cache, FP8.
        pages: `[pages]` int32; the first page for negative ones.

    Returns:
        Codes `[pages * page_size, width]` in the cache's flavour of FP8, and their scales, fp32.
    """
    codes, scales = (region[pages.long().clamp_min(0)].flatten(0, 1) for region in keys.regions)
    return codes.view(getattr(torch, f"float8_{keys.format.fp8}")), scales.view(torch.float32).flatten()


def score_prompts(
    found: Sequence[Prompt],
    tokens: slice,
    step: Step,
    count: int,
    width: int,
    score: Callable[[Prompt, slice], torch.Tensor],
    others: Callable[[slice, slice], torch.Tensor],
) -> torch.Tensor:
    """The scores of all queries, as `dsv4_index_logits` gives them.

    Args:
        found: The prompts among them, in their order.
        tokens: Which of the step's tokens the queries are.
        step: The step.
        count: How many queries there are.
        width: Columns of the result.
        score: Scores a prompt's rows of the queries, `[rows, entries]` fp32, or more columns.
        others: Scores rows of the queries that are no prompt's, and which tokens of the step they are.

    Returns:
        `[count, width]` fp32, or more columns.
    """
    start, _, _ = tokens.indices(step.num_tokens)
    out: torch.Tensor | None = None
    for rows, prompt in _with_gaps(found, count):
        if prompt is None:
            scores = others(rows, slice(start + rows.start, start + rows.stop))
        else:
            scores = score(prompt, rows)
        if rows == slice(0, count) and scores.shape[1] >= width:
            return scores[:, :width]
        if out is None:
            out = torch.empty(count, width, dtype=torch.float32, device=step.positions.device)
        seen = min(width, scores.shape[1])
        out[rows, :seen] = scores[:, :seen]
    return others(slice(0, 0), slice(start, start)) if out is None else out


def _with_gaps(found: Sequence[Prompt], count: int) -> Iterator[tuple[slice, Prompt | None]]:
    """All of so many queries in their order: those of prompts, and those between them."""
    begin = 0
    for prompt in found:
        if begin < prompt.tokens.start:
            yield slice(begin, prompt.tokens.start), None
        yield prompt.tokens, prompt
        begin = prompt.tokens.stop
    if begin < count:
        yield slice(begin, count), None
