"""Bytes of each format against golden values and against the definition."""

import math

import pytest
import torch

from dsv4core.fp8 import MIN_AMAX, power_of_two_exponent
from dsv4core.kvcache import allocate_cache, cache_layout, decode_rows, encode_rows, with_fp8_flavour
from dsv4core.model.rope import rope_table, rotate
from dsv4core.model.shapes import PRESETS

MODEL = PRESETS["v4_flash"]
PACKED = cache_layout(MODEL, "fp8_ds_mla", "fp8")
INDEX = PACKED.index


def packed_row(nope: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(nope, (0, 512 - nope.shape[-1]))[None]


def test_golden_packed_insert():
    i = torch.arange(512)
    kv = (((53 * i) % 97 - 48) / 16).bfloat16()
    table = rope_table(MODEL.rope, 64, 1001)
    data, scales = encode_rows(PACKED.window, rotate(kv[None].float(), torch.tensor([1000]), table))
    golden = "fc62fa6ef774f278 7c58fa6bf872f476 7bd0fb68f970f675 7ae0fc62fa6ef774 79e67c58fa6bf872 "
    golden += "78ea7bd0fb68f970 78ed7ae0fc62fa6e"
    assert [bytes(data[0, 64 * t : 64 * t + 8].tolist()).hex() for t in range(7)] == golden.split()
    assert scales.tolist() == [[120] * 7 + [0]]
    words = data[0, 448:456].view(torch.int16).tolist()
    assert [w & 0xFFFF for w in words] == [0x3FE8, 0x3F62, 0xBF7F, 0x4008]


@pytest.mark.parametrize(
    ("amax", "byte"),
    [(0.0, 105), (1.0, 119), (3.5, 120), (3.515625, 121), (448.0, 127), (450.0, 128), (1e-4, 105)],
)
def test_scale_byte_of_a_tile(amax, byte):
    nope = torch.zeros(448)
    nope[70] = amax
    scales = encode_rows(PACKED.window, packed_row(nope))[1][0]
    assert scales.tolist() == [105, byte, 105, 105, 105, 105, 105, 0]


def test_rounding_follows_the_power_of_two_scale():
    # 449 is 448 in bf16 -> scale 1; 450 -> scale 2, code e4m3(225) = 224, value 448 (not 2 * 448).
    for value, byte, expected in [(448.0, 127, 448.0), (450.0, 128, 448.0)]:
        regions = encode_rows(PACKED.window, packed_row(torch.full((64,), value)))
        assert regions[1][0, 0] == byte
        assert decode_rows(PACKED.window, regions)[0, 0] == expected


def test_rows_are_rounded_to_bfloat16_before_their_tile_is_scaled():
    # 448.9 is 448 in bf16, which needs scale 1; unrounded it would need 2. The index key likewise.
    row = torch.full((1, 512), 448.9)
    assert encode_rows(PACKED.window, row)[1][0, :7].tolist() == [127] * 7
    assert encode_rows(INDEX, row[:, :128])[1].view(torch.float32).item() == 1.0


def test_exponent_is_the_exact_ceiling_for_every_bfloat16_magnitude():
    bits = torch.arange(0, 0x7F80, dtype=torch.int32).to(torch.int16)
    amax = bits.view(torch.bfloat16).float()
    exponent = power_of_two_exponent(amax.clamp_min(MIN_AMAX))
    for value, found in zip(amax.tolist(), exponent.tolist(), strict=True):
        floor = max(value, float(torch.tensor(1e-4)))
        assert math.ldexp(448.0, found) >= floor > math.ldexp(448.0, found - 1)


@pytest.mark.parametrize("flavour", ["e4m3fn", "e4m3fnuz"])
def test_all_codes_and_all_scales_decode_exactly(flavour):
    format = with_fp8_flavour(PACKED.window, flavour)
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(getattr(torch, f"float8_{flavour}")).float()
    for byte in (0, 1, 105, 127, 128, 200, 254):
        data = torch.zeros(4, 576, dtype=torch.uint8)
        data[:, :64] = codes.view(4, 64)
        scales = torch.full((4, 8), byte, dtype=torch.uint8)
        decoded = decode_rows(format, [data, scales])[:, :64].flatten()
        expected = (values.double() * 2.0 ** (byte - 127)).float()
        assert torch.equal(decoded.nan_to_num(nan=7.5), expected.nan_to_num(nan=7.5))
        assert torch.equal(decoded.isnan(), values.isnan())


def test_fnuz_flavour_has_its_own_codes_and_clamp():
    format = with_fp8_flavour(PACKED.window, "e4m3fnuz")
    regions = encode_rows(format, packed_row(torch.full((64,), 448.0)))
    assert regions[1][0, 0] == 128  # 448 / 224 = 2
    assert decode_rows(format, regions)[0, 0] == 448.0
    one = torch.full((1, 576), 0x38, dtype=torch.uint8)
    scales = torch.full((1, 8), 127, dtype=torch.uint8)
    assert decode_rows(PACKED.window, [one, scales])[0, 0] == 1.0
    assert decode_rows(format, [one, scales])[0, 0] == 0.5


def test_nan_and_infinity_are_not_hidden():
    nope = torch.zeros(448)
    nope[3], nope[64], nope[200] = float("nan"), float("inf"), 1.0
    row = decode_rows(PACKED.window, encode_rows(PACKED.window, packed_row(nope)))[0]
    assert row[3].isnan()
    assert not row[64].isfinite()
    assert row[200] == 1.0  # its own tile is untouched


@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 1.0, 300.0, 1e4])
def test_packed_round_trip_error_is_half_a_code(magnitude):
    rows = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * magnitude
    regions = encode_rows(PACKED.window, rows)
    decoded = decode_rows(PACKED.window, regions)
    assert torch.equal(decoded[:, 448:], rows[:, 448:].bfloat16().float())
    scale = 2.0 ** (regions[1][:, :7].float() - 127)
    error = (decoded[:, :448] - rows[:, :448].bfloat16().float()).abs().unflatten(1, (7, 64))
    assert (error <= 16 * scale[..., None]).all()


def test_index_row_has_one_fp32_scale():
    row = torch.zeros(1, 128)
    row[0, 5] = 450.0
    codes, scale = encode_rows(INDEX, row)
    assert scale.view(torch.float32).item() == 2.0
    assert decode_rows(INDEX, [codes, scale])[0, 5] == 448.0


def test_plain_fp8_uses_the_caches_scale_without_rounding_to_bfloat16():
    format = cache_layout(MODEL, "fp8_e4m3", "fp8").window
    value = torch.tensor(1.0625 + 2**-12)  # above the tie between 1.0 and 1.125; bf16 would round to the tie
    rows, scale = value.expand(1, 512), torch.tensor(0.5)
    assert decode_rows(format, encode_rows(format, rows))[0, 0] == 1.125
    assert encode_rows(format, rows, scale)[0][0, 0] == 0x41  # 2.125+ -> 2.25
    assert decode_rows(format, encode_rows(format, rows, scale), scale)[0, 0] == 1.125
    assert decode_rows(format, encode_rows(format, torch.full((1, 512), 1e4)))[0, 0] == 448.0


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_plain_rows_are_rounded_once(name, dtype):
    cache = allocate_cache(cache_layout(MODEL, name, "fp8").window, 2, 4)
    rows = torch.randn(3, 512)
    cache.write(torch.tensor([5, -1, 2]), rows)
    assert torch.equal(cache.read(torch.tensor([5, 2])), rows[[0, 2]].to(dtype).float())
    assert cache.pool.dtype == dtype
    assert int((cache.pool != 0).any(-1).sum()) == 2
