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
    lse.masked_fill_((attends == 0)[:, None], -torch.inf)
    share = sink_shares(lse, attends, sinks, scale)[..., None]
    out.copy_(torch.where(share == 0, 0.0, out.float() * share))


def sink_shares(
    lse: torch.Tensor, attends: torch.Tensor, sinks: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """What outputs are to be multiplied with, for an operation that reads them anyway.

    Args: as of `apply_sink`; `lse` stays as it is.

    Returns:
        `[tokens, heads]` fp32; 0 for a query that attends nothing.
    """
    share = torch.full_like(lse, scale) if sinks is None else scale * torch.sigmoid(lse - sinks)
    return share.masked_fill((attends == 0)[:, None], 0.0)
