"""FP8 and bf16 in Triton kernels: the arithmetic of `dsv4core.fp8`.

Codes are made and read with integers, since sm_80 and sm_86 convert none. From sm_89 on the chip makes the
same ones, but for the sign of a NaN.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@lru_cache
def multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device's matrix units take this FP8 dtype; elsewhere codes are converted beforehand."""
    if device.type != "cuda":
        return False
    if torch.version.hip is None:
        return dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) >= (8, 9)
    chip = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return (chip, dtype) in {("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn)}


def stages(device: torch.device, wanted: int) -> int:
    """Tiles in flight: what is wanted on NVIDIA's chips; 2 on AMD's, whose shared memory has 64 KB."""
    return 2 if device.type == "cuda" and torch.version.hip is not None else wanted


def converts_packed(device: torch.device) -> bool:
    """Whether the device takes the PTX by which `bf16_of_codes` converts two codes at once."""
    return device.type == "cuda" and torch.version.hip is None


@triton.jit
def bf16_bits(x):
    """fp32 rounded to bf16, ties to even, as its bits; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16)


@triton.jit
def bf16_value(bits):
    """The fp32 value of bf16 bits."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x, AXIS: tl.constexpr):
    """The largest magnitude along an axis; NaN, which `tl.max` would pass over, if there is one."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=AXIS).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(amax, least, FNUZ: tl.constexpr):
    """`ceil(log2(max(amax, least) / largest code))`; 128 where `amax` is infinite or NaN."""
    bits = tl.maximum(amax, least).to(tl.int32, bitcast=True)  # a NaN may become `least` here: see below
    power: tl.constexpr = 134 if FNUZ else 135  # 448 is 0.875 * 2 ** 9, and 126 is a mantissa's bias
    exponent = (bits >> 23) - power + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(amax < float("inf"), exponent, 128)


@triton.jit
def two_to(exponent):
    """`2 ** exponent` as fp32 for exponents of -128 to 127; infinity for 128."""
    normal = (exponent + 127) << 23
    small = 0x800000 >> tl.minimum(tl.maximum(-126 - exponent, 0), 31)
    return tl.where(exponent < -126, small, normal).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(scale):
    """`1 / scale`, rounded to the nearest as torch does; Triton's division need not be."""
    return tl.div_rn(tl.full((), 1.0, tl.float32), scale)


@triton.jit
def fp8_codes(x, FNUZ: tl.constexpr):
    """E4M3 codes of fp32 values, clamped to 448 (FNUZ: 224), ties to even; NaN stays NaN."""
    if cuda_capability_geq(8, 9) and not FNUZ:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # saturates
    largest: tl.constexpr = 224.0 if FNUZ else 448.0
    bias: tl.constexpr = 8 if FNUZ else 7
    sign = (x.to(tl.uint32, bitcast=True) >> 31) << 7
    size = tl.minimum(tl.abs(x), largest)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - bias) << 3)
    # 2 ** 23 has no room for fractions: the sum is rounded, ties to even.
    unit: tl.constexpr = 2.0 ** (bias + 2)
    small = (size * unit + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(size < 2.0 ** (1 - bias), small, normal)
    if FNUZ:
        code = tl.where(code == 0, 0, code | sign.to(tl.int32))
        return tl.where(x == x, code, 0x80).to(tl.uint8)
    return tl.where(x == x, code | sign.to(tl.int32), 0x7F | sign.to(tl.int32)).to(tl.uint8)


@triton.jit
def fp8_values(codes, FNUZ: tl.constexpr):
    """The fp16 values of E4M3 codes. Their bits, moved to fp16's place, are off by a power of two."""
    size = (codes & 0x7F).to(tl.uint16)
    value = (size << 7).to(tl.float16, bitcast=True) * (128.0 if FNUZ else 256.0)
    value = tl.where((codes & 0x80) != 0, -value, value)
    nan: tl.constexpr = float("nan")
    return tl.where(codes == 0x80, nan, value) if FNUZ else tl.where(size == 0x7F, nan, value)


@triton.jit
def bf16_of_codes(codes):
    """E4M3 codes as bf16 times 2^-120: their bits, moved to bf16's place, two at a time."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, sign;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        and.b32 sign, low, 0x80008000;
        and.b32 low, low, 0x7f007f00;
        shr.b32 low, low, 4;
        or.b32 $0, low, sign;
        and.b32 sign, high, 0x80008000;
        and.b32 high, high, 0x7f007f00;
        shr.b32 high, high, 4;
        or.b32 $1, high, sign;
        }
        """,
        "=r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )
