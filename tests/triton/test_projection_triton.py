"""The attention output rotated back and quantised, code by code; products with weights in FP8."""

from __future__ import annotations

import pytest
import torch

from dsv4core import ops
from dsv4core.api import ConfigError, Weight
from dsv4core.model.rope import rope_table
from dsv4core.model.rope import rotate_back as rope_back
from dsv4core.model.shapes import PRESETS
from dsv4core.ops.inverse_rope_quant.triton import inverse_rope_quant
from dsv4core.ops.linear import triton as kernel
from dsv4core.ops.linear.triton import FEW, RotateBack, grouped_linear, linear, prepare_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODEL = PRESETS["v4_flash"]
ROPE = rope_table(MODEL.compress_rope, 64, 4096, DEVICE)


@pytest.mark.parametrize("heads", [1, 8, 11])
def test_rotated_back_and_quantised(heads: int) -> None:
    """Blocks of nothing, of tiny and of huge values, and NaN; rows that are apart."""
    positions = torch.tensor([0, 7, 4095], device=DEVICE)
    attention = torch.randn(3, heads + 2, 512, device=DEVICE)[:, :heads]
    attention[0, 0, :128], attention[1, 0, :128] = 0.0, 1e-12
    attention[1, 0, 128:256], attention[2, 0, 300] = 1e30, float("nan")
    due, due_scale = ops.inverse_rope_quant(attention, positions, ROPE)
    found, scale = inverse_rope_quant(attention, positions, ROPE)
    known = ~due.float().isnan()
    assert torch.equal(found.view(torch.uint8)[known], due.view(torch.uint8)[known])
    assert torch.equal(found.float().isnan(), due.float().isnan())
    torch.testing.assert_close(scale, due_scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("heads", [3, 16])
def test_shares_of_heads(heads: int) -> None:
    """Heads times their shares, as if they had been multiplied before; what has none is nothing, NaN too."""
    attention = torch.randn(4, heads, 512, device=DEVICE)
    positions = torch.tensor([0, 3, 90, 4000], device=DEVICE)
    shares = torch.rand(4, heads, device=DEVICE)
    shares[1], shares[2, 0] = 0.0, 0.0
    due, due_scale = inverse_rope_quant(attention * shares[..., None], positions, ROPE)
    attention[1] = float("nan")
    for own in (inverse_rope_quant, ops.inverse_rope_quant):
        found, scale = own(attention, positions, ROPE, shares)
        assert float((found.float() * scale.repeat_interleave(128, -1))[1].abs().max()) == 0
        assert torch.equal(scale, due_scale)
        assert float((found.float() != due.float()).float().mean()) < 1e-3


def test_no_row() -> None:
    codes, scale = inverse_rope_quant(torch.empty(0, 4, 512, device=DEVICE), torch.empty(0), ROPE)
    assert codes.shape == (0, 4, 512)
    assert scale.shape == (0, 4, 4)


def weight_of(rows: int, columns: int) -> Weight:
    """Random codes, each of them somewhere, and scales over many powers of two."""
    codes = torch.arange(rows * columns, device=DEVICE) * 7 % 254
    codes = torch.where(codes < 127, codes, codes + 1).to(torch.uint8).view(rows, columns)  # no NaN
    size = (-(-rows // 128), -(-columns // 128))
    scale = torch.randint(100, 134, size, device=DEVICE).to(torch.uint8).view(torch.float8_e8m0fnu)
    return Weight(codes.view(torch.float8_e4m3fn), scale, (128, 128))


@pytest.mark.parametrize("tokens", [0, 1, 2, 17, 40, 131, 256, 257])
@pytest.mark.parametrize(("rows", "columns"), [(200, 128), (128, 1536)])
def test_products(tokens: int, rows: int, columns: int) -> None:
    """Rows that are apart."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    weight = weight_of(rows, columns)
    x = torch.randn(tokens, columns + 5, device=DEVICE).to(dtype)[:, :columns]
    due = ops.linear(x.float(), ops.prepare_linear(weight))
    found = linear(x, prepare_linear(weight), torch.float32)
    assert found.dtype == torch.float32
    assert found.shape == due.shape
    tolerance = 4e-3 if tokens > FEW and DEVICE == "cuda" else 1e-5  # torch gives bf16
    assert float((found - due).norm(dim=-1).sub(due.norm(dim=-1) * tolerance).clamp_min(0).sum()) == 0


@pytest.mark.parametrize(("width", "height"), [(32, 64), (64, 128), (128, 128)])
def test_larger_tiles(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for bf16 rows, which the interpreter cannot multiply; rows and tokens do not fill them."""
    monkeypatch.setattr(kernel, "NARROW", width)
    assert kernel.TILES[width][0] == height
    weight, x = weight_of(200, 384), torch.randn(width + 3, 384, device=DEVICE)
    due, found = ops.linear(x, ops.prepare_linear(weight)), linear(x, prepare_linear(weight))
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-5 * float(due.abs().max()))


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_products_of_groups(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    data, x = (torch.randn(size, device=DEVICE).to(dtype) for size in ((384, 256), (9, 776)))
    x = x[:, :768]
    due = torch.einsum("tgi,goi->tgo", x.float().unflatten(1, (3, 256)), data.float().unflatten(0, (3, 128)))
    found = grouped_linear(x, prepare_linear(Weight(data)), 3, out_dtype)
    assert found.dtype == (out_dtype or dtype)
    tolerance = 1e-4 if torch.float32 in (dtype, out_dtype) else 8e-3
    torch.testing.assert_close(found.float(), due.flatten(1), rtol=tolerance, atol=tolerance * 16)


@pytest.mark.parametrize("tokens", [1, 5, 140, 300])
def test_products_of_groups(tokens: int) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    weight, x = weight_of(384, 256), torch.randn(tokens, 3 * 256, device=DEVICE).to(dtype)
    parts = ops.prepare_linear(weight).data.unflatten(0, (3, 128))
    due = torch.einsum("tgi,goi->tgo", x.float().unflatten(1, (3, 256)), parts).flatten(1)
    found = grouped_linear(x, prepare_linear(weight), 3).float()
    assert float((found - due).norm(dim=-1).sub(due.norm(dim=-1) * 4e-3).clamp_min(0).sum()) == 0


@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_heads_rotated_back_as_they_are_multiplied(tokens: int) -> None:
    """Two heads a group; rows that are apart. A single row is rotated within the product, others before."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    weight = weight_of(256, 1024)
    weight = prepare_linear(Weight(weight.data, torch.ones(2, 8, device=DEVICE), weight.block))
    x = torch.randn(tokens, 2048 + 8, device=DEVICE).to(dtype)[:, :2048]
    rotate_back = RotateBack(torch.randint(4096, (tokens,), device=DEVICE), ROPE, 512)
    found = grouped_linear(x, weight, 2, torch.float32, rotate_back)
    due = rotate_back(x).float()
    heads = rope_back(x.float().unflatten(1, (4, 512)), rotate_back.positions, ROPE).to(dtype)
    torch.testing.assert_close(due, heads.float().flatten(1), rtol=2**-7, atol=1e-6)  # products are fused
    torch.testing.assert_close(
        found, grouped_linear(due.to(dtype), weight, 2, torch.float32), rtol=1e-3, atol=1e-3
    )
    assert float((found - grouped_linear(x, weight, 2, torch.float32)).norm()) > 0.05 * float(found.norm())


def test_plain_products() -> None:
    data = torch.randn(70, 40, device=DEVICE).bfloat16()
    x = torch.randn(9, 40, device=DEVICE).bfloat16()
    found = linear(x, prepare_linear(Weight(data)), torch.float32)
    torch.testing.assert_close(found, x.float() @ data.float().T, rtol=1e-4, atol=1e-4)
    assert linear(x, prepare_linear(Weight(data))).dtype == torch.bfloat16


def test_weights_that_are_refused() -> None:
    good = weight_of(128, 128)
    with pytest.raises(ConfigError, match="no powers of two up to 2\\^7"):
        prepare_linear(Weight(good.data, torch.full((1, 1), 0.3), (128, 128)))
    with pytest.raises(ConfigError, match="A weight of 128 x 128 has values that are NaN; write it anew"):
        prepare_linear(Weight(torch.full_like(good.data, float("nan")), good.scale, (128, 128)))
    with pytest.raises(ConfigError, match="Groups of 64 rows were given, and kernels multiply groups of 128"):
        grouped_linear(torch.zeros(1, 256, device=DEVICE), prepare_linear(good), 2)
    with pytest.raises(ConfigError, match="Activations are float16"):
        linear(torch.zeros(1, 128, device=DEVICE).half(), prepare_linear(good))
    with pytest.raises(ConfigError, match=r"blocks of \(64, 128\) was given.*use backend=reference"):
        prepare_linear(Weight(good.data, torch.ones(2, 1), (64, 128)))
