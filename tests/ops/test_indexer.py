"""The indexer: exact top-k, query quantisation, logits against a float64 loop."""

import math

import pytest
import torch

from dsv4core.api import CacheTable, ConfigError
from dsv4core.kvcache import allocate_cache, cache_layout
from dsv4core.model.rope import rope_table, rotate
from dsv4core.model.shapes import PRESETS
from dsv4core.ops import index_logits, index_query, index_topk
from dsv4core.ops.indexer import reference

MODEL = PRESETS["v4_flash"]
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("logits", "k", "expected"),
    [
        ([NAN] * 5, 4, [-1, -1, -1, -1]),
        ([NAN, 1.0, NAN, 0.0], 4, [1, 3, -1, -1]),
        ([2.0, 2.0, 2.0, 2.0], 2, [0, 1]),
        ([1.0, 3.0, 2.0, 3.0, 2.0, 2.0], 3, [1, 2, 3]),
        ([0.0, -INF, 5.0], 3, [0, 2, -1]),
        ([INF, -1.0, INF, 3e38], 3, [0, 2, 3]),
        ([-0.0, 0.0, -1.0], 1, [0]),
        ([1.0], 4, [0, -1, -1, -1]),
        ([], 2, [-1, -1]),
    ],
)
def test_topk_of_a_row(logits, k, expected):
    behind = [INF, NAN, 9.0]
    found = index_topk(torch.tensor([logits + behind]), torch.tensor([len(logits)]), k)
    assert found.tolist() == [expected]
    assert found.dtype == torch.int32


@pytest.mark.parametrize("k", [1, 32, 512, 2048])
def test_topk_equals_a_stable_sort(k):
    generator = torch.Generator().manual_seed(k)
    logits = torch.randint(0, 50, (20, 1000), generator=generator).float()  # many ties
    logits[:, 700:] = torch.where(torch.rand(20, 300, generator=generator) < 0.5, -INF, logits[:, 700:])
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, :k]
    for row, best, found in zip(logits, order, index_topk(logits, torch.full((20,), 1000), k), strict=True):
        expected = sorted(i for i in best.tolist() if row[i] > -INF)
        assert found[: len(expected)].tolist() == expected
        assert (found[len(expected) :] == -1).all()


def test_query_precisions():
    generator = torch.Generator().manual_seed(0)
    q, weights = torch.randn(3, 8, 128, generator=generator) * 20, torch.randn(3, 8, generator=generator)
    positions, table = torch.tensor([0, 9, 300]), rope_table(MODEL.compress_rope, 64, 512)
    rotated, factor = rotate(q, positions, table), 128**-0.5 * 8**-0.5
    wide, folded = index_query(q, weights, positions, table, "fp32")
    assert torch.equal(wide, rotated)
    torch.testing.assert_close(folded, weights * factor)
    narrow, _ = index_query(q, weights, positions, table, "bf16")
    assert torch.equal(narrow, rotated.bfloat16())
    codes, folded = index_query(q, weights, positions, table, "fp8")
    scale = folded / (weights * factor)
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(scale.log2().round(), scale.log2())
    largest = rotated.bfloat16().float().abs().amax(-1) / scale
    assert ((largest <= 448) & (largest > 224)).all()
    torch.testing.assert_close(codes.float() * scale[..., None], rotated, atol=0.0, rtol=0.07)


def test_query_scale_floor_and_rounding():
    table, positions = rope_table(MODEL.compress_rope, 64, 8), torch.tensor([0])
    q = torch.zeros(1, 2, 128)
    q[0, 1, 3] = 448.9  # 448 in bf16
    _, folded = index_query(q, torch.ones(1, 2), positions, table, "fp8")
    scale = folded / (128**-0.5 * 2**-0.5)
    torch.testing.assert_close(scale, torch.tensor([[2.0**-22, 1.0]]))
    with pytest.raises(ConfigError, match="index_dtype=mxfp4 has no query precision here; use fp8, bf16 or"):
        index_query(q, torch.ones(1, 2), positions, table, "mxfp4")


@pytest.mark.parametrize("index_dtype", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("tile", [1 << 24, 300])
def test_logits_against_a_float64_loop(index_dtype, tile, monkeypatch):
    monkeypatch.setattr(reference, "TILE_SCORES", tile)
    generator = torch.Generator().manual_seed(3)
    keys = allocate_cache(cache_layout(MODEL, "bf16", index_dtype).index, 6, 8)
    keys.write(torch.arange(48), torch.randn(48, 128, generator=generator))
    table = CacheTable(torch.tensor([[4, 0, 3], [1, 5, -1]], dtype=torch.int32), torch.empty(0), 8)
    requests = torch.tensor([0, 1, 1, 0, 0], dtype=torch.int32)
    visible = torch.tensor([20, 9, 0, 3, 24])
    q, weights = torch.randn(5, 4, 128, generator=generator), torch.randn(5, 4, generator=generator)
    rope = rope_table(MODEL.compress_rope, 64, 128)
    q, weights = index_query(q, weights, torch.arange(5), rope, index_dtype)
    logits = index_logits(q, weights, keys, table, requests, visible, 30)
    assert logits.shape == (5, 30)
    for t in range(5):
        slots = [int(table.block_table[requests[t], e // 8]) * 8 + e % 8 for e in range(visible[t])]
        score = (q[t].double() @ keys.read(torch.tensor(slots, dtype=torch.int64)).double().T).relu()
        torch.testing.assert_close(
            logits[t, : visible[t]].double(), weights[t].double() @ score, atol=1e-4, rtol=1e-5
        )
    assert index_topk(logits, visible, 6)[2].tolist() == [-1] * 6


def test_an_entry_is_visible_only_when_its_group_is_complete():
    # The best entry is the one that position 7 completes: position 6 must not see it.
    keys = allocate_cache(cache_layout(MODEL, "bf16", "fp32").index, 1, 8)
    keys.write(torch.arange(3), torch.tensor([1.0, 5.0, 9.0])[:, None].expand(3, 128))
    table = CacheTable(torch.tensor([[0]], dtype=torch.int32), torch.empty(0), 8)
    positions = torch.arange(5, 12)
    q, weights = torch.ones(7, 1, 128), torch.ones(7, 1)
    requests = torch.zeros(7, dtype=torch.int32)
    visible = (positions + 1) // 4
    best = index_topk(index_logits(q, weights, keys, table, requests, visible, 3), visible, 1)
    assert best.flatten().tolist() == [0, 0, 1, 1, 1, 1, 2]
