"""Scores by DeepGEMM, FP8 queries and keys: of decodes pages in place, of a prompt keys side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4core.kvcache import KVCache
from dsv4core.ops.indexer.prompts import side_by_side

PAGE_SIZE = 64
"""Keys a page that sm_90's kernel takes; sm_100's takes 32, too."""


@dataclass(frozen=True, eq=False)
class ScorePlan:
    """What all layers of a kind share in a step.

    Attributes:
        lengths: `[tokens, 1]` int32 entries that each query sees, at least 1: without any work the kernel
            that divides it reads out of bounds.
        pages: `[tokens, pages]` int32; 0 where there is none, which is read and not looked at.
        schedule: `[processors + 1, 2]` int32: how the work is divided.
    """

    lengths: torch.Tensor
    pages: torch.Tensor
    schedule: torch.Tensor


def plan_scores(
    visible: torch.Tensor, token_to_request: torch.Tensor, block_table: torch.Tensor
) -> ScorePlan:
    """Divide the scores of a step, whose lengths must not change until they are computed.

    Args:
        visible: `[tokens]` entries that each query sees.
        token_to_request: `[tokens]` row of the block table; rows of padding may be out of range.
        block_table: `[requests, pages]` int32, of pages of 64 keys.
    """
    import deep_gemm

    requests, pages = block_table.shape
    lengths = visible.clamp(1, pages * PAGE_SIZE).int()[:, None].contiguous()
    rows = block_table.index_select(0, token_to_request.clamp(0, requests - 1)).clamp_min(0)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE_SIZE, deep_gemm.get_num_sms())
    return ScorePlan(lengths, rows, schedule)


def index_logits(
    q: torch.Tensor, weights: torch.Tensor, keys: KVCache, plan: ScorePlan, width: int
) -> torch.Tensor:
    """`sum over heads of weight * relu(q · key)` for every entry that a query sees.

    Args:
        q: `[tokens, heads, width]` e4m3, from `index_query`.
        weights: `[tokens, heads]` fp32.
        keys: The index cache, FP8, in pages of 64.
        plan: From `plan_scores`, of the same queries.
        width: Columns of the result, at least the most entries that a query sees.

    Returns:
        `[tokens, width]` fp32 by request-local entry number; behind a query's entries lies anything.
    """
    import deep_gemm

    scores: torch.Tensor = deep_gemm.fp8_paged_mqa_logits(
        q[:, None],
        keys.pool[:, :, None],
        weights.contiguous(),
        plan.lengths,
        plan.pages,
        plan.schedule,
        width,
        False,  # behind a query's entries nothing is looked at
    )
    return scores


def prompt_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: KVCache,
    pages: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """The same for queries of one request, whose keys are brought side by side and read for all of them.

    Args:
        q: `[tokens, heads, width]` e4m3, from `index_query`.
        weights: `[tokens, heads]` fp32.
        keys: The index cache, FP8, in pages of 64.
        pages: `[pages]` int32 of the request, as far as any of the queries sees; 0 for negative ones.
        visible: `[tokens]` entries that each query sees.

    Returns:
        `[tokens, pages * 64]` fp32; behind a query's entries lies anything.
    """
    import deep_gemm

    rows = side_by_side(keys, pages)
    ends = visible.clamp(1, len(pages) * PAGE_SIZE).int()
    scores: torch.Tensor = deep_gemm.fp8_mqa_logits(
        q.contiguous(), rows, weights.contiguous(), torch.zeros_like(ends), ends, False
    )
    return scores
