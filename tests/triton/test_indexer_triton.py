"""Queries, scores of visible entries, and the best of them."""

from __future__ import annotations

import pytest
import torch

from dsv4core import ops
from dsv4core.api import CacheTable, ConfigError
from dsv4core.kvcache import KVCache, allocate_cache, cache_layout
from dsv4core.model.rope import rope_table
from dsv4core.model.shapes import PRESETS
from dsv4core.ops.indexer import topk_triton
from dsv4core.ops.indexer.triton import index_logits, index_query

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
    due, found = (
        run(q, weights, keys, table, requests, visible, 100) for run in (ops.index_logits, index_logits)
    )
    assert found.shape == due.shape
    seen = torch.arange(100, device=DEVICE) < visible[:, None]
    torch.testing.assert_close(found[seen], due[seen], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["fp8", "bf16", "fp32"])
def test_index_query(dtype: str) -> None:
    """Heads of nothing, of tiny and of huge values, and NaN; rows that are apart."""
    q, weights = torch.randn(4, 20, 128, device=DEVICE), torch.randn(4, 23, device=DEVICE)[:, :20]
    q[0, 0], q[1, 1], q[2, 2] = 0.0, 1e-7, 1e6
    q[3, 3, 5] = float("nan")
    rope = rope_table(MODEL.compress_rope, 64, 4096, DEVICE)
    positions = torch.tensor([0, 5, 4095, 77], device=DEVICE)
    due, due_weights = ops.index_query(q, weights, positions, rope, dtype)
    found, found_weights = index_query(q, weights, positions, rope, dtype)
    assert found.dtype == due.dtype
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[due.itemsize]
    nan = due.float().isnan()
    if dtype == "fp32" or (dtype, DEVICE) == ("bf16", "cpu"):  # the interpreter cuts bf16 off
        torch.testing.assert_close(found.float(), due.float(), equal_nan=True, rtol=2**-7, atol=1e-5)
    else:
        assert torch.equal(found.view(bits)[~nan], due.view(bits)[~nan])
        assert torch.equal(found.float().isnan(), nan)
    torch.testing.assert_close(found_weights, due_weights, equal_nan=True)


def test_requests_that_are_none_have_no_scores() -> None:
    """Rows of padding may name requests that the step has not."""
    keys, visible = keys_among_nan("fp8"), torch.full((3,), 5, device=DEVICE)
    q = torch.randn(3, 16, 128, device=DEVICE).to(torch.float8_e4m3fn)
    requests = torch.tensor([7, -1, 0], dtype=torch.int32, device=DEVICE)
    table = CacheTable(torch.tensor(PAGES, dtype=torch.int32, device=DEVICE), visible, 16)
    found = index_logits(q, torch.randn(3, 16, device=DEVICE), keys, table, requests, visible, 16)
    assert bool(found[2, :5].isfinite().all())


def test_an_unknown_precision_is_refused() -> None:
    q = torch.randn(1, 16, 128, device=DEVICE)
    with pytest.raises(ConfigError, match="index_dtype=fp4 has no query precision here"):
        index_query(q, q[..., 0], torch.zeros(1, dtype=torch.int64, device=DEVICE), UNIT, "fp4")


def scores(width: int) -> torch.Tensor:
    """Rows that tie, rows of what is never chosen, and ordinary ones."""
    rows = torch.randn(9, width, device=DEVICE)
    rows[1] = 1.0
    rows[2] = rows[2].round()
    rows[3] = float("nan")
    rows[4, ::2] = float("nan")
    rows[5, 5:] = float("-inf")
    rows[6] = float("-inf")
    rows[7, 17], rows[7, 3] = float("inf"), 3e38
    rows[8] = rows[8].clamp_min(0) * (rows[7] - 0.1).sign()  # zeros of both signs
    return rows


@pytest.mark.parametrize("k", [1, 100, 512])
@pytest.mark.parametrize("width", [60, 513, 2500])
@pytest.mark.parametrize("chunk", [1024, 16384])
def test_index_topk(chunk: int, width: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same entries in the same order, in one program and narrowed twice, and only visible ones."""
    monkeypatch.setattr(topk_triton, "chunk_size", lambda k: chunk)
    rows = scores(width)
    visible = torch.tensor([width, width - 1, *[width] * 4, 1, width, width // 2], device=DEVICE)
    assert torch.equal(topk_triton.index_topk(rows, visible, k), ops.index_topk(rows, visible, k))
    nothing = torch.zeros_like(visible)
    assert bool((topk_triton.index_topk(rows, nothing, k) == -1).all())


@pytest.mark.skipif(DEVICE == "cpu", reason="too large for the interpreter")
@pytest.mark.parametrize("k", [512, 2048])
def test_long_rows(k: int) -> None:
    rows = scores(300_000)
    visible = torch.tensor([300_000, 1, 511, 512, 513, 16_384, 16_385, 40_000, 299_999], device=DEVICE)
    assert torch.equal(topk_triton.index_topk(rows, visible, k), ops.index_topk(rows, visible, k))


def test_a_topk_that_is_too_large() -> None:
    with pytest.raises(
        ConfigError, match="index_topk=9000 is more than this kernel chooses; the most is 8192"
    ):
        topk_triton.index_topk(scores(60), torch.zeros(9, dtype=torch.int64, device=DEVICE), 9000)
