"""Queries, keys and their bytes as the definition has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4core.kvcache import KVCache, allocate_cache, cache_layout, with_fp8_flavour
from dsv4core.model.rope import rope_table
from dsv4core.model.shapes import PRESETS
from dsv4core.ops import qk_norm_rope_insert as defined
from dsv4core.ops.qk_norm_rope_insert.triton import qk_norm_rope_insert

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODEL = PRESETS["v4_flash"]
ROPE = rope_table(MODEL.rope_of(MODEL.layer_kinds[0]), 64, 4096, DEVICE)
MAGNITUDES = (0.0, 1e-6, 1.0, 1.0, 100.0, 448.0, 1.0)
POSITIONS = torch.tensor([0, 1, 255, 4095, 17, 2, 3000], device=DEVICE)
SLOTS = torch.tensor([19, 0, 4, 5, -1, 11], device=DEVICE)  # the last token has none


def pools(format: str, flavour: str = "e4m3fn") -> list[KVCache]:
    """Pools of four pages of five rows, each followed by something else, for the definition and a kernel."""
    window = with_fp8_flavour(cache_layout(MODEL, format, "fp8").window, flavour)
    stride = window.page_bytes(5) + 2 * window.page_alignment
    return [allocate_cache(window, 4, 5, device, page_stride_bytes=stride) for device in ("cpu", DEVICE)]


def projected(heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    factors = torch.tensor(MAGNITUDES, device=DEVICE)[:, None]
    q, kv = torch.randn(7, heads, 512, device=DEVICE), torch.randn(7, 512, device=DEVICE) * factors
    return (q * factors[..., None]).to(dtype), kv.to(dtype)


def both(q: torch.Tensor, kv: torch.Tensor, caches: list[KVCache], **more: object) -> list[torch.Tensor]:
    """What both return. The definition runs on a CPU: a GPU's complex products are fused."""
    found = qk_norm_rope_insert(q, kv, POSITIONS, ROPE, caches[1], SLOTS, 1e-6, **more)
    scale = {name: own.cpu() for name, own in more.items() if isinstance(own, torch.Tensor)}
    q, kv, positions, rope, slots = (own.cpu() for own in (q, kv, POSITIONS, ROPE, SLOTS))
    due = defined(q, kv, positions, rope, caches[0], slots, 1e-6, **more | scale)
    return [due.to(DEVICE), found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("flavour", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("format", ["fp8_ds_mla", "bf16", "fp8_e4m3", "fp32"])
def test_keys(format: str, flavour: str, dtype: torch.dtype) -> None:
    """Byte for byte, and no byte beside them."""
    caches = pools(format, flavour)
    both(*projected(2, dtype), caches)
    due, found = (cache.pool.untyped_storage().tolist() for cache in caches)
    assert found == due


@pytest.mark.parametrize("heads", [1, 3, 4, 8, 9, 17])
def test_queries(heads: int) -> None:
    """Any number of heads; padded ones are exact zeros."""
    due, found = both(*projected(heads, torch.float16), pools("bf16"), padded_heads=heads + 3)
    torch.testing.assert_close(found, due)
    assert bool((found[:, heads:] == 0).all())


@pytest.mark.parametrize("heads", [4, 8, 17])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_fp8_queries(dtype: torch.dtype, heads: int) -> None:
    scale = torch.tensor([0.03], device=DEVICE)
    due, found = both(*projected(heads, torch.float32), pools("bf16"), q_dtype=dtype, q_scale=scale)
    assert found.dtype == dtype
    assert int((found.view(torch.uint8) != due.view(torch.uint8)).sum()) <= heads, "a value between two codes"


def test_fp8_queries_without_a_scale() -> None:
    """The cache's scale is not theirs; padded heads are zeros without a sign."""
    caches = pools("fp8_e4m3")
    scaled = [replace(cache, scale=torch.tensor([0.5], device=cache.pool.device)) for cache in caches]
    due, found = both(*projected(3, torch.float32), scaled, padded_heads=5, q_dtype=torch.float8_e4m3fn)
    assert int((found.view(torch.uint8) != due.view(torch.uint8)).sum()) <= 4, "a value between two codes"
    assert bool((found[:, 3:].view(torch.uint8) == 0).all())
    assert torch.equal(*(cache.pool.view(torch.uint8).cpu() for cache in scaled))


def test_rows_of_padding_may_have_no_position() -> None:
    q, kv = projected(2, torch.float32)
    slots = torch.full_like(POSITIONS, -1)
    out = qk_norm_rope_insert(q, kv, torch.full_like(POSITIONS, -1), ROPE, pools("bf16")[1], slots, 1e-6)
    assert bool(out.isfinite().all())


def test_rows_that_are_apart() -> None:
    """q and kv as slices of what one product gave."""
    whole = torch.randn(7, 5 * 512 + 512 + 7, device=DEVICE)
    q, kv = whole[:, : 5 * 512].unflatten(1, (5, 512)), whole[:, 5 * 512 : 6 * 512]
    caches = pools("fp32")
    due, found = both(q, kv, caches)
    torch.testing.assert_close(found, due)
    assert torch.equal(caches[1].pool.cpu(), caches[0].pool)


def test_no_token() -> None:
    q, kv = projected(2, torch.float32)
    nothing = POSITIONS[:0]
    out = qk_norm_rope_insert(q[:0], kv[:0], nothing, ROPE, pools("bf16")[1], nothing, 1e-6)
    assert tuple(out.shape) == (0, 2, 512)
