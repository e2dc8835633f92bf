"""Block tables: growing, rings, running out, giving back."""

import pytest
import torch

from dsv4core.api import C4A, C128A, CacheError, Limits, PageSizes
from dsv4core.kvcache import PagedTable, PageGroup, cache_layout
from dsv4core.kvcache.pools import CachePools, bytes_per_token, page_groups
from dsv4core.model.shapes import PRESETS, layer_spec


def test_a_context_grows_page_by_page_and_is_given_back():
    table = PagedTable(PageGroup("context", 256), num_pages=3, max_requests=2, max_model_len=1024)
    table.grow(0, 300)
    table.grow(1, 1)
    table.grow(0, 512)
    assert table.block_table.tolist() == [[0, 1, -1, -1], [2, -1, -1, -1]]
    with pytest.raises(CacheError) as error:
        table.grow(1, 257)
    assert str(error.value) == (
        "request 1 needs 1 more pages of the context cache for 257 tokens, and 0 are free; make the pool "
        "larger or "
        "run fewer requests."
    )
    assert table.block_table[1].tolist() == [2, -1, -1, -1]
    table.release(0)
    assert table.free_pages == 2
    table.grow(1, 600)
    assert table.block_table.tolist() == [[-1] * 4, [2, 0, 1, -1]]
    with pytest.raises(
        CacheError, match="asks for 1025 tokens in the context cache, .* has room for 1024; raise"
    ):
        table.grow(0, 1025)


def test_a_ring_reuses_its_pages_in_turn():
    table = PagedTable(
        PageGroup("window", 64, ring_tokens=130), num_pages=6, max_requests=2, max_model_len=640
    )
    table.grow(0, 70)
    table.grow(0, 640)
    assert table.block_table[0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    table.grow(1, 64)
    assert table.free_pages == 2


@pytest.mark.parametrize("chunk", [1, 4096, 65_536])
def test_retained_state_does_not_depend_on_the_chunk(chunk):
    limits = Limits(chunk, 1, 1 << 20, chunk)
    _, _, states = page_groups(PRESETS["v4_flash"], (C4A, C128A), PageSizes(), limits, decode_query_len=1)
    held = {name: group.held_pages(1 << 20) * group.page_tokens for name, group in states.items()}
    assert held == {"c4a": 12, "c128a": 136}  # 8 and 128 rows, one for the query, whole pages


def test_pools_of_a_model_and_bytes_per_token_of_context():
    model = PRESETS["v4_flash"]
    layout = cache_layout(model, "fp8_ds_mla", "fp8")
    layers = [layer_spec(model, i) for i in range(43)]
    assert bytes_per_token(layers, layout) == 3850.25  # 21 * (584 + 132) / 4 + 20 * 584 / 128
    pools = CachePools(layers[:4], layout, PageSizes(), Limits(64, 2, 512, 64))
    kinds = [{n for n, c in vars(pools.layers[i]).items() if c is not None} for i in range(4)]
    assert kinds[0] == {"window"}
    assert kinds[2] == {"window", "compressed", "index", "state", "index_state"}
    assert kinds[3] == {"window", "compressed", "state"}
    assert [pools.layers[i].window.page_size for i in range(4)] == [64] * 4
    assert pools.layers[2].compressed.page_size == pools.layers[2].index.page_size == 64
    assert pools.layers[3].compressed.page_size == 2
    assert (pools.layers[2].state.page_size, pools.layers[3].state.page_size) == (4, 8)
    pools.tables.grow(1, 512)
    assert all((table.block_table[1] >= 0).all() for table in pools.tables.all())
    pools.tables.release(1)
    assert all((table.block_table == -1).all() for table in pools.tables.all())


def test_growing_is_all_or_nothing():
    model = PRESETS["v4_flash"]
    pools = CachePools(
        [layer_spec(model, 2)], cache_layout(model, "bf16", "fp8"), PageSizes(), Limits(64, 1, 512, 64)
    )
    pools.tables.context._free.clear()
    with pytest.raises(CacheError, match="more pages of the context cache"):
        pools.tables.grow(0, 100)
    assert all(torch.equal(t.block_table, torch.full_like(t.block_table, -1)) for t in pools.tables.all())
