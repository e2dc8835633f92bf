"""Attention over named rows against golden values and a float64 loop."""

import math

import pytest
import torch

from dsv4core.kvcache import allocate_cache, cache_layout
from dsv4core.model.shapes import PRESETS
from dsv4core.ops import sparse_mla
from dsv4core.ops.sparse_mla import reference

MODEL = PRESETS["v4_flash"]
SCALE = 512**-0.5
FORMATS = ["fp8_ds_mla", "bf16", "fp8_e4m3", "fp32"]


def pool(rows, kv_format="fp32", page_size=4):
    cache = allocate_cache(
        cache_layout(MODEL, kv_format, "fp8").window, -(-len(rows) // page_size), page_size
    )
    cache.write(torch.arange(len(rows)), rows)
    return cache


def naive(q, pools, sinks):
    """Float64, one query and one head at a time, over the rows that the caches decode to."""
    tokens, heads, _ = q.shape
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full((tokens, heads), -math.inf)
    for t in range(tokens):
        rows = [cache.read(s[t][s[t] >= 0].long()) for cache, s in pools]
        keys = torch.cat(rows).double()
        if len(keys) == 0:
            continue
        for h in range(heads):
            scores = keys @ q[t, h].double() * SCALE
            total = scores.logsumexp(0)
            lse[t, h] = total
            with_sink = torch.logaddexp(total, sinks[h].double()) if sinks is not None else total
            out[t, h] = (scores - with_sink).exp() @ keys
    return out, lse


def test_golden_attention_with_sink():
    i, s = torch.arange(512, dtype=torch.float64), torch.arange(5)
    q = torch.stack([torch.sin(0.05 * i * (h + 1)) for h in range(2)])[None].float()
    cache = pool(torch.cos(0.03 * i * (s[:, None] + 1)).float())
    slots, sinks = torch.arange(5)[None], torch.tensor([0.5, -math.inf])
    out, lse = sparse_mla(q, [(cache, slots)], SCALE, sinks, want_lse=True)
    golden = torch.tensor(
        [[0.89485416, 0.89323247, -0.75202031, -0.65215583], [1.0, 0.99626121, -0.54864779, -0.23401295]]
    )
    torch.testing.assert_close(out[0][:, [0, 1, 100, 511]], golden, atol=2e-6, rtol=0)
    torch.testing.assert_close(lse[0], torch.tensor([2.64131246, 2.29705118]), atol=2e-6, rtol=0)
    logits = torch.tensor(
        [
            [2.42192574, -1.33614603, -0.29059830, -0.35544838, 0.05120522],
            [0.73307758, 0.57554454, 1.57387630, -1.85528133, 0.09849896],
        ]
    )
    found = reference._scores(q, cache.read(torch.arange(5)), None, SCALE)[0]
    torch.testing.assert_close(found, logits, atol=2e-6, rtol=0)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (3, 17), (70, 8), (130, 2)])
def test_two_pools_against_a_float64_loop(kv_format, tokens, heads):
    generator = torch.Generator().manual_seed(tokens)
    window = pool(torch.randn(40, 512, generator=generator), kv_format, page_size=7)
    extra = pool(torch.randn(90, 512, generator=generator), kv_format, page_size=2)
    q = torch.randn(tokens, heads, 512, generator=generator)
    slots = [
        torch.randint(-3, size, (tokens, width), generator=generator).clamp_min(-1).int()
        for size, width in ((40, 11), (90, 23))
    ]
    slots[1][0] = -1
    slots[0][-1] = slots[1][-1] = -1  # the last query names nothing
    sinks = torch.randn(heads, generator=generator) * 2
    pools = [(window, slots[0]), (extra, slots[1])]
    for sink in (sinks, None):
        out, lse = sparse_mla(q, pools, SCALE, sink, want_lse=True)
        expected, expected_lse = naive(q, pools, sink)
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-5)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
        assert torch.equal(out[-1], torch.zeros_like(out[-1]))
        assert (lse[-1] == -math.inf).all()


def test_infinite_sinks():
    cache, q = pool(torch.randn(4, 512)), torch.randn(1, 3, 512)
    slots = torch.tensor([[0, 1, 2, 3]])
    without, _ = sparse_mla(q, [(cache, slots)], SCALE)
    out, _ = sparse_mla(q, [(cache, slots)], SCALE, torch.tensor([-math.inf, math.inf, 0.0]))
    assert torch.equal(out[0, 0], without[0, 0])
    assert torch.equal(out[0, 1], torch.zeros(512))
    assert 0 < out[0, 2].norm() < without[0, 2].norm()
    nothing = torch.full((1, 4), -1)
    empty, lse = sparse_mla(q, [(cache, nothing)], SCALE, torch.tensor([-math.inf, 0.0, 9.0]), want_lse=True)
    assert torch.equal(empty, torch.zeros_like(empty))
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_rows_that_are_not_named_never_matter(poison):
    clean = pool(torch.randn(16, 512), page_size=4)
    slots = torch.tensor([[0, 5, -1, 7], [-1, 2, 5, -1]])
    q = torch.randn(2, 4, 512)
    expected, _ = sparse_mla(q, [(clean, slots)], SCALE)
    unnamed = [s for s in range(16) if s not in (0, 2, 5, 7)]
    clean.pool.view(16, 512)[unnamed] = poison
    out, _ = sparse_mla(q, [(clean, slots)], SCALE)
    assert torch.equal(out, expected)


def test_a_row_that_is_not_finite_reaches_only_the_queries_that_name_it():
    cache = pool(torch.randn(8, 512))
    slots = torch.tensor([[0, 1], [1, 2], [2, 3], [4, 5]])
    q = torch.randn(4, 2, 512)
    expected, _ = sparse_mla(q, [(cache, slots)], SCALE)
    cache.pool.view(8, 512)[1, 17] = math.nan
    out, _ = sparse_mla(q, [(cache, slots)], SCALE)
    assert out[:2].isnan().any(-1).all()
    torch.testing.assert_close(out[2:], expected[2:], atol=1e-6, rtol=1e-5)


def test_a_score_beyond_float32_reaches_only_the_query_that_names_its_row():
    cache = pool(torch.randn(8, 512))
    cache.pool.view(8, 512)[1] = 3e38
    q = torch.ones(2, 2, 512)
    out, _ = sparse_mla(q, [(cache, torch.tensor([[0, 1], [0, 2]]))], SCALE)
    alone, _ = sparse_mla(q[1:], [(cache, torch.tensor([[0, 2]]))], SCALE)
    torch.testing.assert_close(out[1:], alone, atol=1e-6, rtol=1e-5)


def test_an_fp8_query_gives_a_bfloat16_output():
    cache, q = pool(torch.randn(4, 512)), torch.randn(1, 2, 512).to(torch.float8_e4m3fn)
    out, _ = sparse_mla(q, [(cache, torch.tensor([[0, 1]]))], SCALE)
    expected, _ = sparse_mla(q.float(), [(cache, torch.tensor([[0, 1]]))], SCALE)
    assert torch.equal(out, expected.bfloat16())


def test_place_of_negative_slots_and_repetition():
    cache, q = pool(torch.randn(6, 512)), torch.randn(1, 2, 512)
    left, _ = sparse_mla(q, [(cache, torch.tensor([[-1, -1, 3, 4]]))], SCALE)
    right, _ = sparse_mla(q, [(cache, torch.tensor([[3, 4, -1, -1]]))], SCALE)
    assert torch.equal(left, right)
    twice = torch.tensor([[3, 4, 4]])
    out, lse = sparse_mla(q, [(cache, twice)], SCALE, want_lse=True)
    expected, expected_lse = naive(q, [(cache, twice)], None)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-6, rtol=1e-6)


def test_sharing_rows_between_queries_changes_nothing_but_rounding(monkeypatch):
    cache, q = pool(torch.randn(64, 512)), torch.randn(40, 4, 512)
    slots = torch.randint(-1, 64, (40, 32))
    shared = sparse_mla(q, [(cache, slots)], SCALE, want_lse=True)
    monkeypatch.setattr(reference, "QUERY_TILE", 1)
    alone = sparse_mla(q, [(cache, slots)], SCALE, want_lse=True)
    torch.testing.assert_close(shared, alone, atol=1e-6, rtol=1e-5)


def test_no_tokens_and_no_rows():
    cache = pool(torch.randn(4, 512))
    for tokens, width in ((0, 4), (2, 0)):
        slots = torch.zeros(tokens, width, dtype=torch.int32)
        out, lse = sparse_mla(torch.randn(tokens, 4, 512), [(cache, slots)], SCALE, want_lse=True)
        assert torch.equal(out, torch.zeros(tokens, 4, 512))
        assert torch.equal(lse, torch.full((tokens, 4), -math.inf))
