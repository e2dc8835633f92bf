"""`out * scale / (1 + exp(sink - lse))`: the softmax with one more score, which has no value."""

from __future__ import annotations

import torch


def apply_sink(
    out: torch.Tensor, lse: torch.Tensor, attends: torch.Tensor, sinks: torch.Tensor | None, scale: float
) -> None:
    """Multiply outputs, in place.

    Args:
        out: `[tokens, heads, head_dim]` bf16, attended without a sink.
        lse: `[tokens, heads]` fp32 log-sum-exp of the scores, natural.
        attends: `[tokens]` int32: 0 for a query that attends nothing, whose output becomes 0 and whose
            log-sum-exp minus infinity, whatever they were.
        sinks: `[heads]` fp32, also infinite; None: only the scale.
        scale: Of the values.
    """
    nothing = (attends == 0)[:, None]
    lse.masked_fill_(nothing, -torch.inf)
    share = torch.full_like(lse, scale) if sinks is None else scale * torch.sigmoid(lse - sinks)
    out.copy_(torch.where(nothing[..., None], 0.0, out.float() * share[..., None]))
