"""The output projection with DeepGEMM: on a GPU the real one, elsewhere a stub with its refusals."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from dsv4core import ops
from dsv4core.api import ConfigError, Weight
from dsv4core.model.rope import rope_table
from dsv4core.model.shapes import PRESETS
from dsv4core.ops.o_proj import deepgemm

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
ROPE = rope_table(PRESETS["v4_flash"].compress_rope, 64, 4096, DEVICE)
GROUPS = 2


def fp8_einsum(
    expr: str, a: Any, b: Any, d: torch.Tensor, c: None = None, recipe: tuple[int, ...] = (1, 128, 128)
) -> None:
    """As sm_90's, and sm_100's with its packed scales of each row."""
    (codes, scale), (weight, weight_scale) = a, b
    assert expr == "bhr,hdr->bhd"
    assert codes.dtype == weight.dtype == torch.float8_e4m3fn
    assert codes.is_contiguous()
    tokens, groups, columns = codes.shape
    _, rows, _ = weight.shape
    if recipe == (1, 1, 128):
        assert tokens == 1 or scale.stride(0) == 1, "Tokens of a group do not lie side by side."
        assert weight_scale.stride(1) == 1
        scale, weight_scale = unpacked(scale), unpacked(weight_scale)
    else:
        assert recipe == (1, 128, 128)
        weight_scale = weight_scale.repeat_interleave(128, dim=1)
    assert scale.shape == (tokens, groups, columns // 128)
    assert scale.dtype == weight_scale.dtype == torch.float32
    assert weight_scale.shape == (groups, rows, columns // 128)
    assert d.shape == (tokens, groups, rows)
    left = codes.float() * scale.repeat_interleave(128, dim=2)
    right = weight.float() * weight_scale.repeat_interleave(128, dim=2)
    d.copy_(torch.einsum("bhr,hdr->bhd", left, right))


def packed(scale: torch.Tensor) -> torch.Tensor:
    """Four exponents in an int32, rows side by side."""
    assert scale.is_contiguous()
    exponents = torch.nn.functional.pad((scale.log2() + 127).to(torch.uint8), (0, -scale.shape[-1] % 4))
    return exponents.view(torch.int32).transpose(1, 2).contiguous().transpose(1, 2)


def unpacked(scale: torch.Tensor) -> torch.Tensor:
    """The powers of two."""
    assert scale.dtype == torch.int32
    return torch.exp2(scale.contiguous().view(torch.uint8).float() - 127)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    if GPU:
        pytest.importorskip("deep_gemm")
        return
    stub = ModuleType("deep_gemm")
    vars(stub).update(fp8_einsum=fp8_einsum, get_mn_major_tma_aligned_packed_ue8m0_tensor=packed)
    monkeypatch.setitem(sys.modules, "deep_gemm", stub)
    monkeypatch.setattr(deepgemm, "_packs_scales", lambda device: False)


def weight_of(rows: int, columns: int) -> Weight:
    codes = torch.randn(rows, columns, device=DEVICE).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 128, (rows // 128, columns // 128), device=DEVICE)
    return Weight(codes, torch.exp2(exponents.float() - 127), (128, 128))


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5, 70])
def test_projection(library: None, tokens: int, packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of padded rows; as far from the definition as FP8 activations are."""
    if packs and GPU:
        pytest.skip("a GPU multiplies its own form of scales, which the other case has")
    if packs:
        monkeypatch.setattr(deepgemm, "_packs_scales", lambda device: True)
    dtype = torch.bfloat16 if GPU else torch.float32
    wo_a, wo_b = weight_of(GROUPS * 256, 2 * 512), weight_of(384, GROUPS * 256)
    attention = torch.randn(tokens, 7, 512, device=DEVICE).to(dtype)[:, :4]
    positions = torch.randint(4096, (tokens,), device=DEVICE)
    prepared = deepgemm.prepare_wo_a(wo_a, GROUPS), deepgemm.prepare_linear(wo_b)
    found = deepgemm.o_proj(attention, positions, ROPE, *prepared, GROUPS)
    defined = ops.prepare_linear(wo_a), ops.prepare_linear(wo_b)
    due = ops.o_proj(attention.float(), positions, ROPE, *defined, GROUPS)
    assert found.dtype == dtype
    assert found.shape == due.shape
    if tokens:
        off = float((found - due).norm() / due.norm())
        assert 1e-3 < off < 4e-2, "E4M3 codes deviate by 2.6e-2."


def test_weights_that_are_refused() -> None:
    good = weight_of(512, 256)
    assert good.scale is not None
    for weight in (
        Weight(good.data.float()),
        Weight(good.data.float(), good.scale, (128, 128)),
        Weight(good.data[:384], good.scale, (128, 128)),
        Weight(good.data, good.scale * 1.5, (128, 128)),
    ):
        with pytest.raises(ConfigError, match="for 2 groups, and DeepGEMM multiplies float8_e4m3fn in whole"):
            deepgemm.prepare_wo_a(weight, GROUPS)
