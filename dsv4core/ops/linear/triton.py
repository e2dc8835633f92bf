"""Products with weights that stay FP8 in memory. Activations stay as they are, whatever their number.

Few rows are bound by the weight's bytes: its codes are converted in registers. Many rows are bound by the
matrix units: the weight is decoded once for all of them, and torch multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4core.api.errors import ConfigError
from dsv4core.api.layer import Weight
from dsv4core.fp8_triton import (
    bf16_of_codes,
    converts_packed,
    fp8_values,
    multiplies_fp8,
    stages,
)
from dsv4core.model.rope_triton import angles, turned
from dsv4core.ops.inverse_rope_quant.triton import inverse_rope
from dsv4core.workspace import MOST_PARTS

BLOCK = 128
"""Rows and columns that share a scale."""
FEW = 256
"""Most rows of activations for which codes are converted in registers; measured on an H200."""
SHORT, LONG = (16, 512, 2), (4, 2048, 4)
"""Rows and columns of a tile, and warps, for a single row of up to 1,024 values, and of more; on an H200."""
NARROW = 16
"""Rows of activations in a tile where they are fp32, for the sake of shared memory: nobody serves in it."""
TILES = {16: (64, 4, 3), 32: (64, 4, 3), 64: (128, 4, 3), 128: (128, 4, 2)}
"""Rows of a tile, warps, and tiles of the weight in flight, by rows of activations in a tile; on an H200."""
ADDED = 1024
"""Sums that a program makes of those of several programs."""
PROGRAMS = MOST_PARTS // 2
"""Programs that a product of few rows is divided into at least, as far as its columns allow."""


@dataclass(frozen=True, eq=False)
class RotateBack:
    """Rows of activations that are heads, whose last channels are rotated back before they are multiplied.

    Attributes:
        positions: `[tokens]` int64.
        rope: `[max_positions, rope_dim]` fp32.
        head_dim: Channels of a head, a power of two up to 512 and not less than 128.
    """

    positions: torch.Tensor
    rope: torch.Tensor
    head_dim: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The rows rotated, for a product that does not do it."""
        return inverse_rope(x.unflatten(1, (-1, self.head_dim)), self.positions, self.rope).flatten(1)


def prepare_linear(weight: Weight) -> Weight:
    """Bring a weight into the form that `linear` multiplies with: FP8 as it is, its scales as fp32.

    Raises:
        ConfigError: Blocks are not of 128 x 128, a scale is no power of two up to 2^7, or there is a NaN.
    """
    if weight.scale is None:
        return Weight(weight.data.contiguous())
    rows, columns = weight.data.shape
    if weight.block != (BLOCK, BLOCK) or columns % BLOCK or weight.data.dtype != torch.float8_e4m3fn:
        raise ConfigError(
            f"A weight of {rows} x {columns} {weight.data.dtype} in blocks of {weight.block} was given, and "
            f"kernels multiply float8_e4m3fn in blocks of {BLOCK} x {BLOCK}; use backend=reference."
        )
    scale = weight.scale.float().contiguous()
    mantissa, exponent = torch.frexp(scale)
    if not bool(((mantissa == 0.5) & (exponent <= 8)).all()):
        raise ConfigError(
            f"A weight of {rows} x {columns} has scales that are no powers of two up to 2^7, and kernels "
            "multiply with those of float8_e8m0fnu; quantise it again."
        )
    if bool((weight.data.view(torch.uint8) & 0x7F == 0x7F).any()):  # converted in pairs, it would be 480
        raise ConfigError(f"A weight of {rows} x {columns} has values that are NaN; write it anew.")
    return Weight(weight.data.contiguous(), scale, weight.block)


def linear(x: torch.Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """As the definition, for a weight from this module's `prepare_linear`."""
    return grouped_linear(x, weight, 1, out_dtype)


def grouped_linear(
    x: torch.Tensor,
    weight: Weight,
    groups: int,
    out_dtype: torch.dtype | None = None,
    rotate_back: RotateBack | None = None,
) -> torch.Tensor:
    """Multiply each group's columns of `x` with its rows of the weight.

    Args:
        x: `[tokens, groups * in]`.
        weight: From `prepare_linear`, `[groups * out, in]`, `out` a multiple of 128 where there are several.
        groups: How many there are.
        out_dtype: Dtype of the result; that of `x` if None.
        rotate_back: How rows are rotated first, if they are; a single one of FP8 weights as it is loaded.

    Returns:
        `[tokens, groups * out]`.

    Raises:
        ConfigError: A group has another number of rows, or activations are fp16, which holds no scaled code.
    """
    dtype, tokens = out_dtype or x.dtype, x.shape[0]
    rows = weight.data.shape[0] // groups
    if groups > 1 and rows % BLOCK:
        raise ConfigError(f"Groups of {rows} rows were given, and kernels multiply groups of {BLOCK}.")
    if weight.scale is not None and x.dtype == torch.float16:
        raise ConfigError("Activations are float16, and FP8 weights are multiplied in bfloat16 or float32.")
    if tokens == 0:
        return torch.empty(0, weight.data.shape[0], dtype=dtype, device=x.device)
    if weight.scale is not None and tokens == 1:
        return _one(x, weight, groups, dtype, rotate_back)
    x = x if rotate_back is None else rotate_back(x)
    if weight.scale is not None and (tokens <= FEW or x.dtype == torch.float32):
        return _few(x, weight, groups, dtype)
    data = weight.data if weight.scale is None else _decoded(weight, x.dtype)
    return _plain(x, data, dtype) if groups == 1 else _plain_groups(x, data, groups, dtype)


def _plain_groups(x: torch.Tensor, weight: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """One product of all groups, which writes rows of tokens."""
    own = x.unflatten(1, (groups, -1)).transpose(0, 1)
    weights = weight.unflatten(0, (groups, -1)).transpose(1, 2)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
    target = out.unflatten(1, (groups, -1)).transpose(0, 1)
    if x.dtype == weight.dtype == dtype:
        torch.bmm(own, weights, out=target)
    else:
        target.copy_(own.float() @ weights.float())
    return out


def _plain(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.dtype == weight.dtype == dtype:
        return torch.nn.functional.linear(x, weight)
    if x.dtype == weight.dtype and dtype == torch.float32 and x.is_cuda and torch.version.hip is None:
        return torch.mm(x, weight.T, out_dtype=dtype)
    return torch.nn.functional.linear(x.float(), weight.float()).to(dtype)


def _one(
    x: torch.Tensor, weight: Weight, groups: int, dtype: torch.dtype, rotate_back: RotateBack | None
) -> torch.Tensor:
    """A single row: every code is read once and multiplied as fp32."""
    assert weight.scale is not None
    rows, columns = weight.data.shape
    out = torch.empty(1, rows, dtype=dtype, device=x.device)
    height, width, warps = SHORT if columns <= 1024 else LONG
    _times_row[(triton.cdiv(rows, height),)](
        x,
        weight.data.view(torch.uint8),
        weight.scale,
        out,
        rows,
        columns,
        rows // groups,
        weight.scale.stride(0),
        HEIGHT=height,
        WIDTH=width,
        BLOCK=BLOCK,
        NATIVE=multiplies_fp8(x.device, weight.data.dtype),
        num_warps=warps,
        **_rotation(rotate_back),
    )
    return out


def _few(x: torch.Tensor, weight: Weight, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Several rows. Where the weight has few rows, programs share its columns and their sums are added."""
    assert weight.scale is not None
    tokens, (rows, columns) = x.shape[0], weight.data.shape
    narrow = x.dtype == torch.float32
    width = NARROW if narrow else min(max(triton.next_power_of_2(tokens), 16), 128)
    height, warps, in_flight = TILES[width]
    tiles = triton.cdiv(rows, height) * triton.cdiv(tokens, width)
    splits = min(triton.next_power_of_2(triton.cdiv(PROGRAMS, tiles)), 8, columns // BLOCK)
    part = torch.float32 if splits > 1 else dtype
    out = torch.empty(splits, tokens, rows, dtype=part, device=x.device)
    _times_rows[(triton.cdiv(rows, height), triton.cdiv(tokens, width), splits)](
        x,
        weight.data.view(torch.uint8),
        weight.scale,
        out,
        tokens,
        rows,
        columns,
        rows // groups,
        x.stride(0),
        weight.scale.stride(0),
        triton.cdiv(columns // BLOCK, splits) * BLOCK,
        HEIGHT=height,
        TOKENS=width,
        BLOCK=BLOCK,
        PACKED=converts_packed(x.device) and x.dtype == torch.bfloat16,
        num_warps=warps,
        num_stages=1 if narrow else stages(x.device, in_flight),
    )
    return out[0] if splits == 1 else _sum(out, dtype)


def _rotation(rotate_back: RotateBack | None) -> dict[str, Any]:
    """What kernels have to know of it."""
    if rotate_back is None:
        return {"positions": None, "rope": None, "HEAD": BLOCK, "ROPE": 0}
    rope = rotate_back.rope
    return {
        "positions": rotate_back.positions,
        "rope": rope,
        "HEAD": rotate_back.head_dim,
        "ROPE": rope.shape[1],
    }


def _sum(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`parts.sum(0).to(dtype)` in one launch."""
    splits, tokens, rows = parts.shape
    out = torch.empty(tokens, rows, dtype=dtype, device=parts.device)
    _add_parts[(triton.cdiv(out.numel(), ADDED),)](
        parts, out, out.numel(), SPLITS=splits, SIZE=ADDED, num_warps=4
    )
    return out


def _decoded(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight in the activations' dtype, which holds each of its values."""
    assert weight.scale is not None
    rows, columns = weight.data.shape
    out = torch.empty(rows, columns, dtype=dtype, device=weight.data.device)
    _decode[(triton.cdiv(rows, 16), triton.cdiv(columns, 512))](
        weight.data.view(torch.uint8),
        weight.scale,
        out,
        rows,
        columns,
        weight.scale.stride(0),
        HEIGHT=16,
        WIDTH=512,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


@triton.jit
def _times_row(
    x,
    weight,
    scales,
    out,
    rows,
    columns,
    group,
    scale_stride,
    positions,
    rope,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    HEAD: tl.constexpr,
    ROPE: tl.constexpr,
):
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    scale_row = scales + (tl.program_id(0) * HEIGHT // BLOCK) * scale_stride
    x += tl.program_id(0) * HEIGHT // group * columns
    total = tl.zeros((HEIGHT,), tl.float32)
    if rope is not None:
        cos, sin = angles(rope, tl.load(positions), HEAD, ROPE)
    for first in range(0, columns, WIDTH):
        column = first + tl.arange(0, WIDTH)
        here = (row < rows)[:, None] & (column < columns)[None, :]
        codes = tl.load(weight + row[:, None].to(tl.int64) * columns + column[None, :], mask=here, other=0)
        factor = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)
        if rope is not None:
            heads = tl.reshape(factor, (WIDTH // HEAD, HEAD))
            heads = turned(heads, cos[None, :], -sin[None, :], WIDTH // HEAD, HEAD, ROPE)
            # Rounded to the activations' dtype, as `inverse_rope` leaves it.
            factor = tl.reshape(heads, (WIDTH,)).to(x.dtype.element_ty).to(tl.float32)
        factor *= tl.load(scale_row + column // BLOCK, mask=column < columns, other=0.0)
        if NATIVE:
            values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            values = fp8_values(codes, False).to(tl.float32)
        total += tl.sum(values * factor[None, :], axis=1)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=row < rows)


@triton.jit
def _times_rows(
    x,
    weight,
    scales,
    out,
    tokens,
    rows,
    columns,
    group,
    x_stride,
    scale_stride,
    split,
    HEIGHT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    begin = tl.program_id(2) * split
    depth = tl.arange(0, BLOCK)
    scale_row = scales + (tl.program_id(0) * HEIGHT // BLOCK) * scale_stride
    codes_of = weight + row[:, None].to(tl.int64) * columns + depth[None, :]
    values_of = x + token[:, None].to(tl.int64) * x_stride + depth[None, :]
    values_of += tl.program_id(0) * HEIGHT // group * columns
    total = tl.zeros((TOKENS, HEIGHT), tl.float32)
    for first in range(begin, tl.minimum(begin + split, columns), BLOCK):
        codes = tl.load(codes_of + first, mask=(row < rows)[:, None], other=0)
        values = tl.load(values_of + first, mask=(token < tokens)[:, None], other=0.0)
        scale = tl.load(scale_row + first // BLOCK)
        # A power of two times a code is exact in bf16: the product needs no second sum.
        if PACKED:
            decoded = bf16_of_codes(codes) * (scale * 2.0**120).to(tl.bfloat16)
        else:
            decoded = (fp8_values(codes, False).to(tl.float32) * scale).to(values.dtype)
        total = tl.dot(values, tl.trans(decoded), total, input_precision="ieee")
    target = out + (tl.program_id(2) * tokens + token[:, None]).to(tl.int64) * rows + row[None, :]
    here = (token < tokens)[:, None] & (row < rows)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=here)


@triton.jit
def _add_parts(parts, out, size, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * size.to(tl.int64) + place, mask=place < size, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < size)


@triton.jit
def _decode(
    weight,
    scales,
    out,
    rows,
    columns,
    scale_stride,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    scale = tl.load(
        scales + (tl.program_id(0) * HEIGHT // BLOCK) * scale_stride + column // BLOCK,
        mask=column < columns,
        other=0.0,
    )
    decoded = fp8_values(tl.load(weight + place, mask=here, other=0), False).to(tl.float32) * scale[None, :]
    tl.store(out + place, decoded.to(out.dtype.element_ty), mask=here)
