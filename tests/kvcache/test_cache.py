"""Pools by slot: addressing inside a page, strides, 64-bit offsets, checks."""

from dataclasses import replace

import pytest
import torch

from dsv4core.api import C4A, SWA, CacheError, LayerCaches
from dsv4core.kvcache import (
    KVCache,
    allocate_cache,
    cache_layout,
    check_block_table,
    check_cache,
    check_caches,
)
from dsv4core.model.shapes import PRESETS, layer_spec

MODEL = PRESETS["v4_flash"]
FORMATS = ["fp8_ds_mla", "bf16", "fp8_e4m3", "fp32"]


def rows_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 512, generator=torch.Generator().manual_seed(seed))


def test_addresses_inside_a_packed_page():
    cache = allocate_cache(cache_layout(MODEL, "fp8_ds_mla", "fp8").window, 2, 64)
    cache.write(torch.tensor([64 + 5]), torch.ones(1, 512))
    page = cache.pool.as_strided((37440,), (1,), 37440)
    assert page.nonzero().min() == 2880  # 5 * 576
    assert page[3328:3330].tolist() == [0x80, 0x3F]  # bf16 1.0: rope starts at 5 * 576 + 448
    assert page[36904:36912].tolist() == [119] * 7 + [0]  # 64 * 576 + 5 * 8
    assert page[36912:].sum() == 0


def test_addresses_inside_an_index_page():
    cache = allocate_cache(cache_layout(MODEL, "fp8_ds_mla", "fp8").index, 1, 64)
    cache.write(torch.tensor([1]), torch.ones(1, 128))
    page = cache.pool.as_strided((8640,), (1,), 0)
    assert page[128:256].unique().tolist() == [0x78]  # 256 * 2^-8
    assert page[8196:8200].view(torch.float32).item() == 2.0**-8  # 64 * 128 + 1 * 4
    assert page[256:8196].sum() == 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("page_size", [2, 61, 64, 576])
def test_strided_pool_reads_and_writes_like_a_tight_one(name, page_size):
    format = cache_layout(MODEL, name, "fp8").window
    tight = allocate_cache(format, 5, page_size)
    stride = format.page_bytes(page_size) + 3 * format.page_alignment
    strided = allocate_cache(format, 5, page_size, page_stride_bytes=stride)
    slots = torch.randperm(5 * page_size)[:9]
    for cache in (tight, strided):
        cache.write(slots, rows_of(9))
    assert torch.equal(tight.pool, strided.pool)
    assert torch.equal(tight.read(slots), strided.read(slots))
    storage = strided.pool.untyped_storage()
    content = format.bytes_per_token * page_size
    whole = torch.tensor(storage, dtype=torch.uint8).view(-1)[: 5 * stride].view(5, stride)
    assert whole[:, content:].sum() == 0  # nothing is written behind a page


def test_negative_slots_write_nothing_and_repeated_runs_write_the_same_bytes():
    cache = allocate_cache(cache_layout(MODEL, "fp8_ds_mla", "fp8").window, 4, 64)
    slots = torch.randperm(256)[:100]
    slots[::3] = -1
    cache.write(slots, rows_of(100))
    first = cache.pool.clone()
    for _ in range(10):
        cache.write(slots, rows_of(100))
    assert torch.equal(first, cache.pool)
    assert int((cache.regions[1] != 0).any(-1).sum()) == int((slots >= 0).sum())


def test_offsets_beyond_two_gibibytes():
    format = cache_layout(MODEL, "fp8_e4m3", "fp8").window
    stride = 1 << 30  # three pages of a sparse 3 GiB allocation; only the touched ones are resident
    storage = torch.empty(3 << 30, dtype=torch.uint8)
    pool = storage.view(torch.float8_e4m3fn).as_strided((3, 64, 512), (stride, 512, 1))
    cache = KVCache(pool, format)
    slot = torch.tensor([2 * 64 + 63])
    cache.write(slot, rows_of(1))
    assert torch.equal(cache.read(slot), rows_of(1).to(torch.float8_e4m3fn).float())


def test_int32_slots_beyond_sixteen_gibibytes():
    """Scales lie 8 B apart: page 2 of pages of 8 GiB starts at unit 2^31."""
    format = cache_layout(MODEL, "fp8_ds_mla", "fp8").window
    stride = (1 << 33) // 576 * 576 + 576
    storage = torch.empty(2 * stride + 37440, dtype=torch.uint8)  # only touched pages are resident
    cache = KVCache(storage.as_strided((3, 64, 584), (stride, 584, 1)), format)
    slot = torch.tensor([2 * 64 + 5], dtype=torch.int32)
    cache.write(slot, rows_of(1))
    tight = allocate_cache(format, 1, 64)
    tight.write(torch.tensor([5]), rows_of(1))
    assert torch.equal(cache.read(slot), tight.read(torch.tensor([5])))


def bad_pools():
    packed = cache_layout(MODEL, "fp8_ds_mla", "fp8").window
    good = allocate_cache(packed, 3, 64)
    plain = cache_layout(MODEL, "fp8_e4m3", "fp8").window
    tight = torch.zeros(3, 64, 584, dtype=torch.uint8)
    return [
        (KVCache(good.pool.view(torch.int8), packed),
         "x: fp8_ds_mla pools are [pages, page_size, 584] of uint8, and the tensor is [3, 64, 584] of int8; "
         "pass the pool as that view."),
        (KVCache(torch.zeros(3, 64, 512, dtype=torch.uint8), packed),
         "x: fp8_ds_mla pools are [pages, page_size, 584] of uint8, and the tensor's rows have 512 "
         "elements."),
        (KVCache(tight, packed),
         "x: fp8_ds_mla pages start at multiples of 576 B, and the page stride is 37376 B; pad each page to "
         "37440 B."),
        (KVCache(tight[:, ::2], packed),
         "x: rows of a page must be contiguous (strides 584, 1), and the tensor's are 1168, 1; only pages "
         "may "
         "be strided."),
        (KVCache(good.pool.as_strided((3, 64, 584), (576, 584, 1)), packed),
         "x: a page of 64 fp8_ds_mla rows takes 37376 B, and the page stride is 576 B; pages would overlap."),
        (KVCache(good.pool, packed, torch.ones(1)),
         "x: fp8_ds_mla has no scale for the whole cache; pass none."),
        (allocate_cache(plain, 1, 64, scale=torch.zeros(1)),
         "x: the cache's scale must be one positive finite fp32 element."),
    ]  # fmt: skip


@pytest.mark.parametrize(("cache", "message"), bad_pools())
def test_a_pool_that_does_not_fit_its_format_is_refused(cache, message):
    with pytest.raises(CacheError) as error:
        check_cache(cache, "x")
    assert str(error.value) == message


def test_tables_that_point_outside_and_lengths_beyond_the_table():
    table = torch.tensor([[0, 1, -1], [2, 9, 77]], dtype=torch.int32)
    check_block_table(table, [128, 64], 64, 3, "window block table")
    with pytest.raises(CacheError) as error:
        check_block_table(table, [128, 65], 64, 3, "window block table")
    assert str(error.value) == (
        "window block table: page 1 of request 1 is 9 in the block table, and the pool has 3 pages."
    )
    with pytest.raises(CacheError) as error:
        check_block_table(table, [193, 1], 64, 3, "window block table")
    assert str(error.value) == (
        "window block table: request 0 has 193 tokens, which need 4 pages of 64 tokens, and its block table "
        "has 3."
    )


def test_caches_of_a_layer_must_be_those_of_its_kind():
    layout = cache_layout(MODEL, "fp8_ds_mla", "fp8")
    window, compressed = allocate_cache(layout.window, 1, 64), allocate_cache(layout.compressed, 1, 64)
    swa, c4a = layer_spec(MODEL, 0), layer_spec(MODEL, 2)
    assert (swa.kind, c4a.kind) == (SWA, C4A)
    check_caches(LayerCaches(window), swa, layout)
    with pytest.raises(CacheError, match="compressed cache was passed, and a swa layer has no such cache"):
        check_caches(LayerCaches(window, compressed), swa, layout)
    with pytest.raises(CacheError, match="layers.2 index cache is missing, and a c4a layer has such cache"):
        check_caches(LayerCaches(window, compressed), c4a, layout)
    plain = allocate_cache(cache_layout(MODEL, "bf16", "fp8").window, 1, 64)
    with pytest.raises(
        CacheError, match="window cache has format bf16, and the backend's layout is fp8_ds_mla"
    ):
        check_caches(LayerCaches(plain), swa, layout)


def test_a_scale_that_is_not_the_layers() -> None:
    layout, spec = cache_layout(MODEL, "fp8_e4m3", "fp8"), layer_spec(MODEL, 0)
    window = allocate_cache(layout.window, 2, 64, scale=torch.full((1,), 0.25))
    check_caches(LayerCaches(window), spec, layout, 0.25)
    for caches, scale in ((window, 1.0), (replace(window, scale=None), 0.25)):
        with pytest.raises(CacheError, match=r"layers.0 window cache has a scale of .*; give both the same"):
            check_caches(LayerCaches(caches), spec, layout, scale)
