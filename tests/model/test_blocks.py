"""Block-scaled FP8: scales by hand, error bounds, ragged edges."""

from __future__ import annotations

import pytest
import torch

from dsv4core.model.blocks import dequantize_block, quantize_block


def test_scales_by_hand() -> None:
    weight = torch.zeros(2, 6)
    weight[:, 0] = torch.tensor([448.0, 1.0])
    weight[:, 2] = torch.tensor([449.0, -3.0])
    weight[0, 4] = 1.75
    data, scale = quantize_block(weight, (1, 2))
    assert (data.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    assert scale.float().tolist() == [[1.0, 2.0, 2.0**-8], [2.0**-8, 2.0**-7, 1.0]]
    assert data[:, 0].tolist() == [448.0, 256.0]
    assert data[1, 2].item() == -384.0
    assert dequantize_block(data, scale, (1, 2))[:, 2].tolist() == [448.0, -3.0]


@pytest.mark.parametrize("size", [(256, 384), (130, 250), (1, 1), (127, 129)])
def test_round_trip_is_within_fp8(size: tuple[int, int]) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(3))
    data, scale = quantize_block(weight)
    assert scale.shape == (-(-size[0] // 128), -(-size[1] // 128))
    error = (dequantize_block(data, scale, (128, 128)) - weight).abs()
    assert (error <= weight.abs() / 16 + scale.float().max() * 2**-10).all()
    assert error.max() > 0


def test_values_that_fp8_holds_come_back_exactly() -> None:
    weight = torch.tensor([[1.0, -0.5, 0.0, 416.0], [3.5, 2.0, 448.0, -15.0]])
    assert torch.equal(dequantize_block(*quantize_block(weight), (128, 128)), weight)


def test_extreme_blocks_have_finite_scales() -> None:
    weight = torch.tensor([[torch.finfo(torch.float32).max, 0.0, 1e-36]])
    data, scale = quantize_block(weight, (1, 1))
    assert scale.float().tolist() == [[2.0**120, 1.0, 2.0**-127]]
    assert data.float().isfinite().all()


def test_fp32_scales_dequantise_alike() -> None:
    weight = torch.randn(200, 200, generator=torch.Generator().manual_seed(4))
    data, scale = quantize_block(weight)
    expected = dequantize_block(data, scale, (128, 128))
    assert torch.equal(dequantize_block(data, scale.float(), (128, 128)), expected)
