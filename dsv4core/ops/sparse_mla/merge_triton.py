"""Parts of a token's attention, each normalised by itself, made one: its log-sum-exp is a part's weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4core.ops.sparse_mla.schedule_triton import Items

MERGED = 8
"""Rows of 2 KB that a program merges at once, if a token has no more parts."""
FEW_ROWS = 4096
"""Tokens times heads, up to which a program merges for one head, and more parts of it at once."""


def merge_parts(
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    items: Items | None,
    splits: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Merge the parts of tokens that have several; the others are in `out` and `lse` already.

    Args:
        parts: `[parts, heads, head_dim]` fp32.
        part_lse: `[parts, heads]` fp32.
        items: Where a token's parts are; None: `splits` of each, side by side.
        splits: As many parts has every token, where they are not items.
        sinks: `[heads]` fp32, or None.
        out: `[tokens, heads, head_dim]`.
        lse: `[tokens, heads]` fp32, or None.
    """
    tokens, heads, width = out.shape
    several = 2 * MERGED if tokens * heads <= FEW_ROWS else MERGED // 2  # most tokens have one part
    count = triton.next_power_of_2(splits) if items is None else several
    together = max(1, MERGED // count)
    places = (None, None) if items is None else (items.firsts, items.parts)
    _merge[(tokens, triton.cdiv(heads, together))](
        *(parts, part_lse, *places, splits, sinks, out, lse, heads),
        PARTS=count,
        HEADS=together,
        WIDTH=width,
        num_warps=4,
    )


@triton.jit
def with_sink(highest, total, sink):
    """The sum of weights with that of the sink, and by how much the other weights fade."""
    sink = tl.minimum(tl.maximum(sink.to(tl.float32) * 1.4426950408889634, -3e38), 3e38)
    top = tl.maximum(highest, sink)
    faded = tl.exp2(highest - top)
    return total * faded + tl.exp2(sink - top), faded


@triton.jit
def _merge(
    parts,
    part_lse,
    firsts,
    places,
    splits,
    sinks,
    out,
    lse,
    heads,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    count, kept = splits, token * splits
    if firsts is not None:
        count = tl.load(firsts + token + 1) - tl.load(firsts + token)
        kept = tl.load(places + token).to(tl.int64)
    if count > 1:
        head, channel = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDTH)
        here, target = head < heads, token * heads + head
        highest = tl.full((HEADS,), float("-inf"), tl.float32)
        total, summed = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS, WIDTH), tl.float32)
        for first in range(0, count, PARTS):
            part = first + tl.arange(0, PARTS)
            row = (kept + part)[:, None] * heads + head[None, :]
            known = (part < count)[:, None] & here[None, :]
            own = tl.load(part_lse + row, mask=known, other=float("-inf"))
            values = tl.load(
                parts + row[:, :, None] * WIDTH + channel[None, None, :], mask=known[:, :, None], other=0.0
            )
            higher = tl.maximum(highest, tl.max(own, axis=0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight, faded = tl.exp(own - base[None, :]), tl.exp(highest - base)
            total = total * faded + tl.sum(weight, axis=0)
            summed = summed * faded[:, None] + tl.sum(weight[:, :, None] * values, axis=0)
            highest = higher
        if lse is not None:
            tl.store(lse + target, highest + tl.log(tl.maximum(total, 1e-37)), mask=here)
        divisor, faded = total, tl.full((HEADS,), 1.0, tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + head, mask=here, other=float("-inf"))
            divisor, faded = with_sink(highest * 1.4426950408889634, total, sink)
        result = summed * (faded / tl.where(divisor > 0, divisor, 1.0))[:, None]
        place = out + target[:, None] * WIDTH + channel[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=here[:, None])
