"""RoPE: golden frequencies, shared tables, and rotation by hand."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from dsv4core.api import RopeParameters, YarnParameters
from dsv4core.model.rope import inverse_frequencies, rope_table, rotate, rotate_back

PLAIN = RopeParameters(theta=10000.0)
YARN = RopeParameters(theta=160000.0, yarn=YarnParameters(16.0, 65536))
PAIRS = [0, 1, 8, 15, 16, 20, 24, 25, 31]
GOLDEN = {
    PLAIN: [
        *(1.000000000e00, 7.498942018e-01, 1.000000015e-01, 1.333521493e-02, 9.999999776e-03),
        *(3.162277862e-03, 1.000000047e-03, 7.498941850e-04, 1.333521504e-04),
    ],
    YARN: [
        *(1.000000000e00, 6.876560450e-01, 5.000000075e-02, 3.635538509e-03, 2.265624935e-03),
        *(2.969777852e-04, 1.953125320e-05, 5.372312444e-06, 5.680529398e-07),
    ],
}


@pytest.mark.parametrize("parameters", [PLAIN, YARN])
def test_golden_frequencies(parameters: RopeParameters) -> None:
    frequencies = inverse_frequencies(parameters, 64)
    assert frequencies.dtype == torch.float32
    golden = torch.tensor(GOLDEN[parameters])
    torch.testing.assert_close(frequencies[PAIRS], golden, rtol=1.2e-7, atol=0)


def test_frequencies_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    yarn = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
    rotary = DeepseekV4RotaryEmbedding(transformers.DeepseekV4Config(rope_parameters=yarn))
    torch.testing.assert_close(inverse_frequencies(PLAIN, 64), rotary.main_inv_freq, rtol=2.4e-7, atol=0)
    torch.testing.assert_close(inverse_frequencies(YARN, 64), rotary.compress_inv_freq, rtol=2.4e-7, atol=0)


def test_yarn_with_one_bound_is_a_step() -> None:
    one_bound = RopeParameters(theta=10000.0, yarn=YarnParameters(2.0, 6, beta_fast=1.0, beta_slow=0.99))
    plain = inverse_frequencies(PLAIN, 8)
    assert inverse_frequencies(one_bound, 8).tolist() == [plain[0].item(), *(plain[1:] / 2).tolist()]


def test_table_holds_cosines_then_sines() -> None:
    table = rope_table(PLAIN, 64, 1001)
    assert (table.shape, table.dtype) == ((1001, 64), torch.float32)
    assert table[0].tolist() == [1.0] * 32 + [0.0] * 32
    angle = 1000 * inverse_frequencies(PLAIN, 64)[16].item()
    assert table[1000, 16].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert table[1000, 48].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_table_is_shared_and_freed() -> None:
    table = rope_table(YARN, 64, 77)
    assert rope_table(RopeParameters(160000.0, YarnParameters(16.0, 65536)), 64, 77, "cpu") is table
    assert rope_table(PLAIN, 64, 77) is not table
    assert rope_table(YARN, 64, 78) is not table
    alive = weakref.ref(table)
    del table
    gc.collect()
    assert alive() is None
    assert rope_table(YARN, 64, 77).shape == (77, 64)


def test_table_is_fp32_whatever_the_defaults() -> None:
    expected = rope_table(PLAIN, 8, 5).clone()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            table = rope_table(PLAIN, 8, 6, "cpu")
            nowhere = rope_table(PLAIN, 8, 6, "meta")
    finally:
        torch.set_default_dtype(default)
    assert table.dtype == torch.float32
    assert torch.equal(table[:5], expected)
    assert (nowhere.device.type, nowhere.dtype, nowhere.shape) == ("meta", torch.float32, (6, 8))


def test_rotation_by_hand() -> None:
    # Two pairs; position 1 turns the first by 90 degrees and the second by 180, position 2 by none.
    table = torch.tensor([[9.0, 9, 9, 9], [0, -1, 1, 0], [1, 1, 0, 0]])
    x = torch.tensor([[7.0, 1, 2, 3, 4], [7, 1, 2, 3, 4]])
    positions = torch.tensor([1, 2])
    assert rotate(x, positions, table).tolist() == [[7, -2, 1, -3, -4], [7, 1, 2, 3, 4]]
    assert rotate_back(x, positions, table).tolist() == [[7, 2, -1, -3, -4], [7, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("parameters", "golden"),
    [
        (PLAIN, [-1.7109375, -0.4453125, 0.890625, -0.70703125, -1.1015625, -1.546875, 0.1796875]),
        (YARN, [-1.7109375, -0.4453125, 0.890625, -0.70703125, -1.1015625, -0.006134033203125, 1.5546875]),
    ],
)
def test_golden_rotation_of_a_normalised_head(parameters: RopeParameters, golden: list[float]) -> None:
    q = ((37 * torch.arange(512) % 101 - 50) / 50).bfloat16().float()
    q = q * torch.rsqrt(q.square().mean() + 1e-6)
    rotated = rotate(q[None], torch.tensor([1000]), rope_table(parameters, 64, 1001)).bfloat16()
    assert rotated[0, [0, 1, 447, 448, 449, 480, 481]].tolist() == golden


@pytest.mark.parametrize("shape", [(6, 64), (6, 512), (6, 3, 512), (6, 2, 3, 128), (0, 4, 128)])
def test_rotate_back_undoes_rotate(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 1, 1, 999, 4095, 17])[: shape[0]]
    table = rope_table(YARN, 64, 4096)
    rotated = rotate(x, positions, table)
    torch.testing.assert_close(rotate_back(rotated, positions, table), x, rtol=0, atol=1e-6)
    assert torch.equal(rotated[..., :-64], x[..., :-64])
    assert rotated[1:].numel() == 0 or not torch.equal(rotated[1:], x[1:])


def test_rotation_is_rounded_once() -> None:
    x = torch.randn(5, 2, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    positions, table = torch.arange(5), rope_table(PLAIN, 64, 5)
    rotated = rotate(x, positions, table)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotate(x.float(), positions, table).bfloat16())
