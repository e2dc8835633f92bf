"""Attention over rows in place, held to the definition on the same bytes."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4core import ops
from dsv4core.api import ConfigError
from dsv4core.fp8_triton import multiplies_fp8
from dsv4core.kvcache import KVCache, allocate_cache, cache_layout, with_fp8_flavour
from dsv4core.model.shapes import PRESETS
from dsv4core.ops.sparse_mla import Rows, schedule_triton
from dsv4core.ops.sparse_mla import triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODEL = PRESETS["v4_flash"]
SCALE = 512**-0.5
FORMATS = ["fp8_ds_mla", "bf16", "fp8_e4m3", "fp32"]
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def pool(name: str, page_size: int, flavour: str = "e4m3fn") -> KVCache:
    """Strided pages of random rows; NaN between them, and in the last page."""
    format = with_fp8_flavour(cache_layout(MODEL, name, "fp8").window, flavour)
    stride = format.page_bytes(page_size) + format.page_alignment
    pages = 130 // page_size + 2
    cache = allocate_cache(format, pages, page_size, DEVICE, page_stride_bytes=stride)
    torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(cache.pool.untyped_storage()).fill_(0xFF)
    slots = torch.arange((pages - 1) * page_size, device=DEVICE)
    cache.write(
        slots, torch.randn(len(slots), 512, device=DEVICE) * torch.rand(len(slots), 1, device=DEVICE) * 8
    )
    return cache


def named(tokens: int, columns: int) -> torch.Tensor:
    """Slots with holes, some named twice; the last token names none."""
    slots = torch.randint(-40, 130, (tokens, columns + 3), device=DEVICE).clamp_min(-1).int()[:, :columns]
    slots[-1] = -1
    return slots


def assert_attention(
    found: tuple[torch.Tensor, torch.Tensor | None], due: tuple[torch.Tensor, torch.Tensor | None]
) -> None:
    bound = 1e-5 if found[0].dtype == torch.float32 else 2**-7
    off = (found[0].float() - due[0].float()).norm(dim=-1)
    assert bool((off <= bound * due[0].float().norm(dim=-1)).all()), float(off.max())
    if due[1] is not None:
        torch.testing.assert_close(found[1], due[1], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("processors", [1, 7])
def test_two_pools(
    name: str, processors: int, short: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of two widths, one with lengths, more heads than a program has; a query of nothing."""
    if name == "fp32" and dtype != torch.float32:
        pytest.skip("fp32 rows are attended by fp32 queries: others round their keys")
    monkeypatch.setattr(schedule_triton, "processors", lambda device: processors)
    monkeypatch.setattr(schedule_triton, "SHORT", 24 if short else 0)
    for blocks in ("WIDE", "MIDDLE"):
        monkeypatch.setattr(schedule_triton, blocks, schedule_triton.NARROW)
    q = torch.randn(3, 21, 512, device=DEVICE).to(dtype)
    lengths = torch.tensor([70, 1, 0], device=DEVICE)
    shared = torch.tensor([1, 0, 0], dtype=torch.int32, device=DEVICE)
    pools = [Rows(pool(name, 64), named(3, 40)), Rows(pool(name, 5), named(3, 70)[:2], lengths, shared)]
    sinks = torch.randn(21, device=DEVICE)
    sinks[:3] = torch.tensor([-math.inf, math.inf, 0.0])
    found = kernels.sparse_mla(q, pools, SCALE, sinks, want_lse=True)
    assert_attention(found, ops.sparse_mla(q, pools, SCALE, sinks, want_lse=True))
    assert bool((found[0][-1] == 0).all())


@pytest.mark.parametrize("short", [True, False])
def test_runs_agree_bit_for_bit(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part is attended first: parts are merged in their order."""
    monkeypatch.setattr(schedule_triton, "SHORT", 24 if short else 0)
    q = torch.randn(5, 24, 512, device=DEVICE).to(DTYPES[-1])
    lengths = torch.tensor([300, 7, 0, 150, 299], device=DEVICE)
    rows = [Rows(pool("fp8_ds_mla", 64), named(5, 40)), Rows(pool("fp8_ds_mla", 5), named(5, 300), lengths)]
    (out, lse), *others = (kernels.sparse_mla(q, rows, SCALE, None, want_lse=True) for _ in range(4))
    assert lse is not None
    for again, own in others:
        assert own is not None
        assert torch.equal(again, out)
        assert torch.equal(own, lse)


@pytest.mark.parametrize("heads", [1, 16, 40])
def test_one_pool_without_a_sink(heads: int) -> None:
    q = torch.randn(2, heads + 2, 512, device=DEVICE)[:, :heads]
    rows = [(pool("fp32", 64), named(2, 33))]
    found, lse = kernels.sparse_mla(q, rows, SCALE)
    assert lse is None
    assert_attention((found, None), ops.sparse_mla(q, rows, SCALE))


@pytest.mark.parametrize("name", ["fp8_ds_mla", "fp8_e4m3"])
def test_the_other_flavour_of_fp8(name: str) -> None:
    q = torch.randn(2, 16, 512, device=DEVICE)
    rows = [(pool(name, 64, "e4m3fnuz"), named(2, 33)), (pool(name, 64), named(2, 33))]
    assert_attention(kernels.sparse_mla(q, rows, SCALE), ops.sparse_mla(q, rows, SCALE))


def test_rows_of_any_magnitude() -> None:
    """Scales of packed rows at both ends; NaN reaches the queries that name it, and no others."""
    cache = pool("fp8_ds_mla", 64)
    rows = torch.randn(8, 512, device=DEVICE)
    rows[0], rows[1], rows[2], rows[3, 9] = 0.0, rows[1] * 1e-7, rows[2] * 1e5, math.nan
    cache.write(torch.arange(8, device=DEVICE), rows)
    q = torch.randn(5, 16, 512, device=DEVICE).to(DTYPES[-1] if DEVICE == "cuda" else torch.float32)
    q[2] *= 1e-4
    slots = torch.tensor([[0, 4], [1, 5], [2, 6], [3, 7], [4, 5]], dtype=torch.int32, device=DEVICE)
    found, due = (run(q, [(cache, slots)], SCALE)[0] for run in (kernels.sparse_mla, ops.sparse_mla))
    assert bool(found[3].isnan().all())
    assert bool(due[3].isnan().any())
    keep = [0, 1, 2, 4]
    assert_attention((found[keep], None), (due[keep], None))


def test_a_scale_beyond_what_is_decoded() -> None:
    """A packed row of 1e25 is finite, but where two codes are converted at once with integers."""
    cache = pool("fp8_ds_mla", 64)
    cache.write(torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.full((1, 512), 1e25, device=DEVICE))
    cuda = DEVICE == "cuda"
    paired = cuda and not multiplies_fp8(torch.device(DEVICE), torch.float8_e4m3fn)
    q = torch.full((1, 16, 512), 1e-20, device=DEVICE).to(torch.bfloat16 if cuda else torch.float32)
    slots = torch.tensor([[0, 5]], dtype=torch.int32, device=DEVICE)
    found = kernels.sparse_mla(q, [(cache, slots)], SCALE)[0]
    assert bool(found.isnan().all() if paired else (found > 9e24).all())


def test_rows_of_padding_may_name_any_table_row() -> None:
    q, cache = torch.randn(3, 16, 512, device=DEVICE), pool("bf16", 64)
    requests = torch.tensor([1, 99, -5], dtype=torch.int32, device=DEVICE)
    rows = Rows(cache, named(3, 20)[:2], torch.tensor([20, 20, 20], device=DEVICE), requests)
    found, _ = kernels.sparse_mla(q, [rows], SCALE)
    due, _ = ops.sparse_mla(q[:1], [(cache, rows.slots[1:])], SCALE)
    assert_attention((found[:1], None), (due, None))


def test_three_pools_are_refused() -> None:
    rows = (pool("bf16", 64), named(1, 5))
    with pytest.raises(ConfigError, match="3 pools were given, and this kernel attends one or two"):
        kernels.sparse_mla(torch.zeros(1, 16, 512, device=DEVICE), [rows] * 3, SCALE)


def test_no_query() -> None:
    out, lse = kernels.sparse_mla(
        torch.empty(0, 4, 512, device=DEVICE), [(pool("bf16", 64), named(1, 5)[:0])], SCALE, None, True
    )
    assert out.shape == (0, 4, 512)
    assert lse is not None
    assert lse.shape == (0, 4)
