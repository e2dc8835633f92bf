"""`apply_sink` and `sink_shares`, in a launch each."""

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


def sink_shares(
    lse: torch.Tensor, attends: torch.Tensor, sinks: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """As the definition."""
    shares = torch.empty_like(lse)
    if lse.numel():
        count, heads = lse.numel(), lse.shape[1]
        _share[(triton.cdiv(count, 1024),)](lse, attends, sinks, shares, scale, count, heads, COUNT=1024)
    return shares


@triton.jit
def _taken(known, sink, some, scale):
    """The share that a sink leaves."""
    return tl.where(some, scale / (1.0 + tl.exp(sink - known)), 0.0)


@triton.jit(do_not_specialize=["scale", "count"])
def _share(lse, attends, sinks, shares, scale, count, heads, COUNT: tl.constexpr):
    place = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    here = place < count
    some = tl.load(attends + place // heads, mask=here, other=0) != 0
    known = tl.load(lse + place, mask=here, other=0.0)
    sink = tl.full((COUNT,), float("-inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + place % heads, mask=here, other=0.0)
    tl.store(shares + place, _taken(known, sink, some, scale), mask=here)


@triton.jit(do_not_specialize=["scale", "heads"])
def _apply(out, lse, attends, sinks, scale, heads, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row, here = tl.program_id(0).to(tl.int64) * heads + head, head < heads
    some = tl.load(attends + tl.program_id(0) + tl.zeros((HEADS,), tl.int32)) != 0
    known = tl.load(lse + row, mask=here, other=0.0)
    sink = tl.full((HEADS,), float("-inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=here, other=0.0)
    share = _taken(known, sink, some, scale)
    tl.store(lse + row, tl.full((HEADS,), float("-inf"), tl.float32), mask=here & ~some)
    place = out + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = tl.load(place, mask=(here & some)[:, None], other=0.0).to(tl.float32)
    values = tl.where(share[:, None] == 0.0, 0.0, values * share[:, None])
    tl.store(place, values.to(out.dtype.element_ty), mask=here[:, None])
