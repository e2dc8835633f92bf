"""`apply_sink` in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADS = 8
"""Heads of one program: 4,096 values."""


def apply_sink(
    out: torch.Tensor, lse: torch.Tensor, attends: torch.Tensor, sinks: torch.Tensor | None, scale: float
) -> None:
    """As the definition; outputs lie side by side, and the head dimension is a power of two."""
    tokens, heads, width = out.shape
    if tokens:
        _apply[(tokens, triton.cdiv(heads, HEADS))](
            out, lse, attends, sinks, scale, heads, HEADS=HEADS, WIDTH=width, num_warps=4
        )


@triton.jit(do_not_specialize=["scale", "heads"])
def _apply(out, lse, attends, sinks, scale, heads, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row, here = tl.program_id(0).to(tl.int64) * heads + head, head < heads
    some = tl.load(attends + tl.program_id(0) + tl.zeros((HEADS,), tl.int32)) != 0
    share = tl.full((HEADS,), 1.0, tl.float32) * scale
    if sinks is not None:
        known = tl.load(lse + row, mask=here, other=0.0)
        sink = tl.load(sinks + head, mask=here, other=0.0)
        share = share / (1.0 + tl.exp(sink - known))
    tl.store(lse + row, tl.full((HEADS,), float("-inf"), tl.float32), mask=here & ~some)
    place = out + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = tl.load(place, mask=(here & some)[:, None], other=0.0).to(tl.float32)
    values = tl.where(some[:, None], values * share[:, None], 0.0)
    tl.store(place, values.to(out.dtype.element_ty), mask=here[:, None])
