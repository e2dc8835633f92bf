"""q norm and RoPE, insert, linear, inverse RoPE with quantisation, output projection."""

import pytest
import torch

from dsv4core.api import Weight
from dsv4core.kvcache import allocate_cache, cache_layout
from dsv4core.model.blocks import quantize_block
from dsv4core.model.rope import rope_table, rotate, rotate_back
from dsv4core.model.shapes import PRESETS
from dsv4core.ops import inverse_rope_quant, linear, o_proj, prepare_linear, qk_norm_rope_insert

MODEL = PRESETS["v4_flash"]
EPS = 1e-6
PLAIN, COMPRESSED = rope_table(MODEL.rope, 64, 1001), rope_table(MODEL.compress_rope, 64, 1001)


def insert(q, kv, positions, slots, kv_format="fp32", table=PLAIN, **kwargs):
    window = allocate_cache(cache_layout(MODEL, kv_format, "fp8").window, 2, 4)
    return qk_norm_rope_insert(q, kv, positions, table, window, slots, EPS, **kwargs), window


@pytest.mark.parametrize(
    ("table", "golden"),
    [
        (PLAIN, [-1.7109375, -0.4453125, 0.890625, -0.70703125, -1.1015625, -1.546875, 0.1796875,
                 1.2890625, -0.8671875]),
        (COMPRESSED, [-1.7109375, -0.4453125, 0.890625, -0.70703125, -1.1015625, -0.006134033203125,
                      1.5546875, 1.1640625, -1.03125]),
    ],
)  # fmt: skip
def test_golden_query(table, golden):
    i = torch.arange(512)
    q = (((37 * i) % 101 - 50) / 50).bfloat16()[None, None]
    out, _ = insert(q, torch.zeros(1, 512).bfloat16(), torch.tensor([1000]), torch.tensor([0]), table=table)
    assert out[0, 0, [0, 1, 447, 448, 449, 480, 481, 510, 511]].tolist() == golden


def test_padded_heads_are_exact_zeros_and_padding_tokens_store_nothing():
    q, kv = torch.randn(5, 3, 512), torch.randn(5, 512)
    slots = torch.tensor([2, -1, 0])  # two tokens beyond the slot mapping, one without a slot
    out, window = insert(q, kv, torch.arange(5), slots, padded_heads=8)
    assert out.shape == (5, 8, 512)
    assert torch.equal(out[:, 3:], torch.zeros(5, 5, 512))
    assert (out[:, :3].square().mean(-1) - 1).abs().max() < 1e-4
    written = (window.pool.view(-1, 512) != 0).any(-1).nonzero().flatten().tolist()
    assert written == [0, 2]
    torch.testing.assert_close(window.read(torch.tensor([2])), rotate(kv[:1], torch.tensor([0]), PLAIN))


def test_fp8_query_is_scaled_and_clamped():
    q, scale = torch.randn(2, 2, 512), torch.tensor([0.001])
    wide, _ = insert(q, torch.randn(2, 512), torch.arange(2), torch.arange(2))
    out, _ = insert(
        q, torch.randn(2, 512), torch.arange(2), torch.arange(2), q_dtype=torch.float8_e4m3fn, q_scale=scale
    )
    assert out.dtype == torch.float8_e4m3fn
    expected = (wide * 1000).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(out.float(), expected.float())
    assert out.float().abs().max() == 448


def test_key_is_rounded_by_its_format_only():
    kv = torch.randn(1, 512).bfloat16()
    _, window = insert(torch.randn(1, 1, 512).bfloat16(), kv, torch.tensor([77]), torch.tensor([1]), "bf16")
    expected = rotate(kv.float(), torch.tensor([77]), PLAIN).bfloat16()
    assert torch.equal(window.read(torch.tensor([1])), expected.float())


def test_linear_with_block_scaled_weight():
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    data, scale = quantize_block(weight)
    prepared = prepare_linear(Weight(data, scale, (128, 128)))
    rows = torch.arange(200)[:, None] // 128
    naive = data.float() * scale.float()[rows, torch.arange(300) // 128]
    assert torch.equal(prepared.data, naive)
    assert (naive - weight).abs().max() <= 2**-4 * weight.abs().max()
    x = torch.randn(5, 300).bfloat16()
    assert torch.equal(linear(x, prepared), (x.float() @ naive.T).bfloat16())
    assert linear(x, prepared, torch.float32).dtype == torch.float32
    plain = prepare_linear(Weight(weight.bfloat16()))
    assert torch.equal(plain.data, weight.bfloat16().float())


def test_inverse_rope_quant_blocks():
    attention = torch.randn(3, 2, 512)
    attention[0, 0, :128] = 0.0
    positions = torch.tensor([5, 900, 1000])
    codes, scale = inverse_rope_quant(attention, positions, COMPRESSED)
    assert (codes.dtype, codes.shape, scale.shape) == (torch.float8_e4m3fn, (3, 2, 512), (3, 2, 4))
    assert torch.equal(scale.log2(), scale.log2().round())
    rotated = rotate_back(attention, positions, COMPRESSED)
    largest = rotated.unflatten(-1, (4, 128)).abs().amax(-1).clamp_min(1e-10) / scale
    assert ((largest <= 448) & (largest > 224)).all()
    decoded = codes.float() * scale.repeat_interleave(128, dim=-1)
    torch.testing.assert_close(decoded, rotated, atol=float(scale[1:].max()) * 2**-9, rtol=2**-4)
    nope = inverse_rope_quant(attention, torch.zeros(3, dtype=torch.int64), COMPRESSED)
    assert torch.equal(codes[..., :384].float(), nope[0][..., :384].float())


def test_output_projection_by_group():
    generator = torch.Generator().manual_seed(1)
    heads, groups, rank, hidden = 6, 3, 5, 7
    attention = torch.randn(4, heads, 512, generator=generator)
    wo_a = Weight(torch.randn(groups * rank, heads // groups * 512, generator=generator))
    wo_b = Weight(torch.randn(hidden, groups * rank, generator=generator))
    positions = torch.tensor([0, 3, 500, 1000])
    found = o_proj(attention, positions, PLAIN, wo_a, wo_b, groups)
    rotated = rotate_back(attention, positions, PLAIN).double()
    for t in range(4):
        low = [
            wo_a.data[g * rank : (g + 1) * rank].double() @ rotated[t, 2 * g : 2 * g + 2].flatten()
            for g in range(groups)
        ]
        torch.testing.assert_close(
            found[t].double(), wo_b.data.double() @ torch.cat(low), atol=1e-3, rtol=1e-5
        )
