"""`inverse_rope_quant` in one kernel, which rotates back without quantising, too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4core.fp8_triton import fp8_codes, magnitude, power_of_two, two_to
from dsv4core.model.rope_triton import rotated
from dsv4core.ops.inverse_rope_quant.reference import BLOCK, MIN_AMAX

HEADS = 16
"""Heads of one program: 8,192 values, 64 a thread."""


def inverse_rope_quant(
    attention: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    shares: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the definition; the head dimension is a power of two."""
    tokens, heads, width = attention.shape
    codes = torch.empty(attention.shape, dtype=torch.float8_e4m3fn, device=attention.device)
    scale = torch.empty(tokens, heads, width // BLOCK, dtype=torch.float32, device=attention.device)
    _launch(attention, positions, rope, codes.view(torch.uint8), scale, shares)
    return codes, scale


def inverse_rope(attention: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """The heads rotated back, in their dtype and side by side, for products that take no FP8."""
    out = torch.empty(attention.shape, dtype=attention.dtype, device=attention.device)
    _launch(attention, positions, rope, out, None)
    return out


def _launch(
    attention: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    shares: torch.Tensor | None = None,
) -> None:
    tokens, heads, width = attention.shape
    if tokens:
        _rotate_back[(tokens, triton.cdiv(heads, HEADS))](
            attention,
            positions,
            rope,
            out,
            scales,
            shares,
            heads,
            attention.stride(0),
            attention.stride(1),
            MIN_AMAX,
            HEADS=HEADS,
            WIDTH=width,
            ROPE=rope.shape[1],
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )


@triton.jit
def _rotate_back(
    attention,
    positions,
    rope,
    out,
    scales,
    shares,
    heads,
    token_stride,
    head_stride,
    least,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column, here = tl.arange(0, WIDTH), (head < heads)[:, None]
    source = attention + token * token_stride + head[:, None] * head_stride + column[None, :]
    x = tl.load(source, mask=here, other=0.0).to(tl.float32)
    if shares is not None:
        share = tl.load(shares + token * heads + head, mask=head < heads, other=0.0)[:, None]
        x = tl.where(share == 0.0, 0.0, x * share)
    x = rotated(x, rope, tl.load(positions + token), -1, HEADS, WIDTH, ROPE)
    row = token * heads + head[:, None]
    target = out + row * WIDTH + column[None, :]
    if scales is None:
        tl.store(target, x.to(out.dtype.element_ty), mask=here)
    else:
        blocks = tl.reshape(x, (HEADS, WIDTH // BLOCK, BLOCK))
        exponent = power_of_two(magnitude(blocks, 2), least, False)
        quantised = fp8_codes(blocks * two_to(-exponent)[:, :, None], False)
        tl.store(target, tl.reshape(quantised, (HEADS, WIDTH)), mask=here)
        place = row * (WIDTH // BLOCK) + tl.arange(0, WIDTH // BLOCK)[None, :]
        tl.store(scales + place, two_to(exponent), mask=here)
