"""Scores of visible entries, and minus infinity behind them."""

from __future__ import annotations

import pytest
import torch

from dsv4core import ops
from dsv4core.api.step import CacheTable
from dsv4core.kvcache import KVCache, allocate_cache, cache_layout
from dsv4core.model.shapes import PRESETS
from dsv4core.ops.indexer.triton import index_logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODEL = PRESETS["v4_flash"]
PAGES = [[3, 8, 1, 2], [5, 0, 7, -1]]
UNIT = torch.cat([torch.ones(8, 32), torch.zeros(8, 32)], dim=1).to(DEVICE)
"""A table that turns nothing."""


def keys_among_nan(dtype: str) -> KVCache:
    """Random keys in strided pages, NaN in the page that nobody has and between pages."""
    format = cache_layout(MODEL, "fp8_ds_mla", dtype).index
    stride = format.page_bytes(16) + format.page_alignment
    keys = allocate_cache(format, 9, 16, DEVICE, page_stride_bytes=stride)
    torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(keys.pool.untyped_storage()).fill_(0xFF)
    for page in (*PAGES[0], *PAGES[1][:-1]):
        keys.write(torch.arange(16, device=DEVICE) + 16 * page, torch.randn(16, 128, device=DEVICE))
    return keys


@pytest.mark.parametrize("dtype", ["fp8", "bf16", "fp32"])
def test_index_logits(dtype: str) -> None:
    keys, positions = keys_among_nan(dtype), torch.arange(5, device=DEVICE)
    q, weights = torch.randn(5, 64, 128, device=DEVICE), torch.randn(5, 64, device=DEVICE)
    q, weights = ops.index_query(q, weights, positions, UNIT, dtype)
    requests = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32, device=DEVICE)
    visible = torch.tensor([61, 62, 64, 0, 33], device=DEVICE)
    table = CacheTable(torch.tensor(PAGES, dtype=torch.int32, device=DEVICE), positions, 16)
    due = ops.index_logits(q, weights, keys, table, requests, visible)
    found = index_logits(q, weights, keys, table, requests, visible)
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-4)
    wide = index_logits(q, weights, keys, table, requests, visible, width=100)
    assert torch.equal(wide[:, :64], found)
    assert bool(torch.isneginf(wide[:, 64:]).all())
