"""Numbers and rows in kernels: the codecs' bytes, for every code and at every edge."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from dsv4core.fp8 import FP8_MAX, MIN_AMAX, power_of_two_exponent, to_fp8
from dsv4core.fp8_triton import bf16_bits, fp8_codes, fp8_values, power_of_two, two_to

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLAVOURS = ["e4m3fn", "e4m3fnuz"]


@triton.jit
def convert(x, out, KIND: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at)
    if KIND == 0:
        tl.store(out + at, fp8_codes(value, FNUZ))
    elif KIND == 1:
        tl.store(out + at, fp8_values(value, FNUZ))
    elif KIND == 2:
        tl.store(out + at, bf16_bits(value))
    elif KIND == 3:
        tl.store(out + at, power_of_two(value, 1e-4, FNUZ))
    else:
        tl.store(out + at, two_to(value))


def converted(x: torch.Tensor, dtype: torch.dtype, kind: int, fnuz: bool = False) -> torch.Tensor:
    """Each value through a conversion of the kernels."""
    x = torch.nn.functional.pad(x, (0, -len(x) % 256)).to(DEVICE)
    out = torch.empty(len(x), dtype=dtype, device=DEVICE)
    convert[(len(x) // 256,)](x, out, kind, fnuz, 256)
    return out.cpu()


def edges(*dtypes: torch.dtype) -> torch.Tensor:
    """All values of 8 and 16 bits, those halfway between them and their neighbours, and what is none."""
    values: list[torch.Tensor] = []
    for dtype in dtypes:
        bits = 8 * dtype.itemsize
        every = torch.arange(1 << bits, dtype=torch.int64).to(torch.uint8 if bits == 8 else torch.uint16)
        own = every.view(dtype).float()
        own = own[own.isfinite()].sort().values
        halves = (own[1:] + own[:-1]) / 2
        up, down = torch.tensor(float("inf")), torch.tensor(float("-inf"))
        values += [own, halves, torch.nextafter(halves, up), torch.nextafter(halves, down)]
    values.append(torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 1e-45, 3e38, 1e-4, 449.0]))
    return torch.cat(values)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_codes(flavour: str) -> None:
    values = edges(torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    found = converted(values, torch.uint8, 0, flavour == "e4m3fnuz")[: len(values)]
    due = to_fp8(values, flavour).view(torch.uint8)
    assert torch.equal(found, due), values[found != due][:5]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_values_of_codes(flavour: str) -> None:
    codes = torch.arange(256).to(torch.uint8)
    found = converted(codes, torch.float16, 1, flavour == "e4m3fnuz").float()
    due = codes.view(getattr(torch, f"float8_{flavour}")).float()
    assert torch.equal(found.nan_to_num(9e9), due.nan_to_num(9e9))


def test_bf16() -> None:
    values = edges(torch.bfloat16)
    found = converted(values, torch.uint16, 2)[: len(values)].view(torch.bfloat16)
    due = values.bfloat16()
    assert torch.equal(found.isnan(), due.isnan())
    assert torch.equal(found[~due.isnan()].view(torch.int16), due[~due.isnan()].view(torch.int16))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_exponents(flavour: str) -> None:
    powers = 2.0 ** torch.arange(-20, 40)
    amax = torch.cat([powers * own for own in (1.0, 1.75, 1.7500001, 1.9999)])
    amax = torch.cat([amax, torch.tensor([0.0, 1e-45, float("inf"), float("nan"), 3e38])])
    found = converted(amax, torch.int32, 3, flavour == "e4m3fnuz")[: len(amax)]
    due = power_of_two_exponent(amax.clamp_min(MIN_AMAX), FP8_MAX[flavour])
    assert found.tolist() == due.tolist()


def test_powers() -> None:
    """Subnormal ones, too; the largest exponent is that of infinities and NaN."""
    exponents = torch.arange(-128, 129, dtype=torch.int32)
    assert torch.equal(converted(exponents, torch.float32, 4)[:257], 2.0 ** exponents.double().float())
