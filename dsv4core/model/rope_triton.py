"""RoPE of neighbouring pairs in Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated(x, rope, position, direction, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """Rows `[ROWS, WIDTH]` fp32, their last `ROPE` channels turned to a position of `rope`; back by -1.

    Rows of padding may have a position of -1. Where bits count, as in caches, kernels are launched with
    `enable_fp_fusion=False`, so that products are rounded as the definition rounds them.
    """
    cos, sin = angles(rope, position, WIDTH, ROPE)
    return turned(x, cos[None, :], direction * sin[None, :], ROWS, WIDTH, ROPE)


@triton.jit
def angles(rope, position, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """Cosines and sines `[WIDTH // 2]` of a row's pairs at a position."""
    pair = tl.arange(0, WIDTH // 2) - (WIDTH - ROPE) // 2
    table = rope + tl.maximum(position, 0) * ROPE + pair
    cos = tl.load(table, mask=pair >= 0, other=1.0)
    return cos, tl.load(table + ROPE // 2, mask=pair >= 0, other=0.0)


@triton.jit
def turned(x, cos, sin, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """Rows `[ROWS, WIDTH]`, their last `ROPE` channels turned by angles `[1, WIDTH // 2]`."""
    turns = (tl.arange(0, WIDTH // 2) >= (WIDTH - ROPE) // 2)[None, :]
    even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
    # What is not turned stays as it is: a product with 0 would lose signs of zeros, and spread infinities.
    turned_even = tl.where(turns, even * cos - odd * sin, even)
    turned_odd = tl.where(turns, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(turned_even, turned_odd), (ROWS, WIDTH))
