"""Rows gathered from pages, bit for bit those that the cache reads."""

from __future__ import annotations

import pytest
import torch

from dsv4core import ops
from dsv4core.kvcache import allocate_cache, cache_layout, with_fp8_flavour
from dsv4core.model.shapes import PRESETS
from dsv4core.ops import triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("flavour", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("name", ["fp8_ds_mla", "bf16", "fp8_e4m3", "fp32"])
@pytest.mark.parametrize("page_size", [64, 5])
def test_gathered_rows(name: str, page_size: int, flavour: str) -> None:
    """A request of nothing, pages that there are not, and more rows than a table has."""
    format = with_fp8_flavour(cache_layout(PRESETS["v4_flash"], name, "fp8").window, flavour)
    scale = torch.full((1,), 0.25, device=DEVICE) if name == "fp8_e4m3" else None
    stride = format.page_bytes(page_size) + format.page_alignment
    cache = allocate_cache(format, 7, page_size, DEVICE, page_stride_bytes=stride, scale=scale)
    cache.write(torch.arange(6 * page_size, device=DEVICE), torch.randn(6 * page_size, 512, device=DEVICE))
    table = torch.tensor([[3, 0, 5], [1, 2, 4], [2, -1, 1]], dtype=torch.int32, device=DEVICE)
    first, count = torch.tensor([4, 0, 1], device=DEVICE), torch.tensor([2 * page_size, 0, 40], device=DEVICE)
    height = max(2 * page_size, 40) + 3
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    due = torch.full((3, height + 9, 512), float("nan"), dtype=dtype, device=DEVICE)
    found = due.clone()
    ops.gather_rows(cache, table, first, count, due[:, 5 : 5 + height])
    kernels.gather_rows(cache, table, first, count, found[:, 5 : 5 + height])
    assert int((~due.isnan()).sum()) >= 512 * (2 * page_size + 4)
    torch.testing.assert_close(found, due, rtol=0, atol=0, equal_nan=True)
