"""The layer in all kinds: chunks, mixed batches, short and empty ones, drafts, poison, ranks."""

import math
from dataclasses import replace

import pytest
import torch

from dsv4core import ops
from dsv4core.api import C4A, C128A, CacheError
from dsv4core.model.rope import rotate, rotate_back
from tests.layer.conftest import KINDS, attend, hidden_states, rows_of, run_alone

kinds = pytest.mark.parametrize("kind", list(KINDS))
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


def project(stack, layer, tokens, seed=0):
    return layer.attention.project(hidden_states(tokens, seed))


@kinds
@pytest.mark.parametrize(
    "formats", [("fp32", "fp32"), ("fp8_ds_mla", "fp8"), ("bf16", "fp8"), ("fp8_e4m3", "fp8")]
)
def test_any_chunking_gives_the_same_caches_and_outputs(make_stack, kind, formats):
    length = 390
    whole = make_stack([KINDS[kind]], length=length, kv=formats[0], index=formats[1])
    projected = project(whole, whole.layers[0], length)
    expected = run_alone(whole, whole.layers[0], projected, [length])
    for chunks in ([length - 1, 1], [130, 3, 257], [1] * 9 + [200, 181]):
        stack = make_stack([KINDS[kind]], length=length, kv=formats[0], index=formats[1])
        out = run_alone(stack, stack.layers[0], projected, chunks)
        torch.testing.assert_close(out, expected, **CLOSE)
        for name in ("compressed", "index"):
            one, other = (getattr(s.pools.layers[KINDS[kind]], name) for s in (whole, stack))
            assert one is None or torch.equal(one.pool, other.pool), name
        window, position = stack.pools.layers[KINDS[kind]].window, torch.arange(length - 128, length)
        slots = [
            s.pools.tables.window.block_table[0, position // 64].long() * 64 + position % 64
            for s in (whole, stack)
        ]
        mine, theirs = window.read(slots[1]), whole.pools.layers[KINDS[kind]].window.read(slots[0])
        assert torch.equal(mine, theirs)


@kinds
def test_mixed_steps_equal_each_request_alone(make_stack, kind):
    # Decodes first, then prefills that start, continue and idle; lengths around a window and the ratios.
    lengths = (3, 4, 127, 129, 300, 1)
    stack = make_stack([KINDS[kind]], requests=len(lengths), length=300)
    layer = stack.layers[0]
    inputs = [project(stack, layer, n, seed) for seed, n in enumerate(lengths)]
    alone = []
    for projected, n in zip(inputs, lengths, strict=True):
        single = make_stack([KINDS[kind]], length=300)
        alone.append(run_alone(single, single.layers[0], projected, [n]))
    steps = [
        (0, 3, 100, 0, 150, 0),
        (0, 0, 0, 129, 0, 0),
        (2, 0, 26, 0, 149, 0),
        (1, 1, 1, 0, 1, 1),
    ]
    done, outputs = [0] * len(lengths), [[] for _ in lengths]
    for query in steps:
        step = stack.plan(done, query)
        parts = [rows_of(p, slice(d, d + q)) for p, d, q in zip(inputs, done, query, strict=True)]
        joined = rows_of(inputs[0], slice(0, 0))
        values = {
            name: None if getattr(joined, name) is None else torch.cat([getattr(p, name) for p in parts])
            for name in vars(joined)
        }
        out = attend(stack, layer, replace(joined, **values), step)
        for request, rows in enumerate(out.split(list(query))):
            outputs[request].append(rows)
        done = [d + q for d, q in zip(done, query, strict=True)]
    assert tuple(done) == lengths
    for found, expected in zip(outputs, alone, strict=True):
        torch.testing.assert_close(torch.cat(found), expected, **CLOSE)


@kinds
def test_empty_steps(make_stack, kind):
    stack = make_stack([KINDS[kind]], requests=2)
    layer = stack.layers[0]
    for query in ([], [0, 0]):
        step = stack.plan([0] * len(query), query)
        out, _ = stack.attend(layer, hidden_states(0), step)
        assert out.shape == (0, 256)
        assert step.num_tokens == 0


@kinds
@pytest.mark.parametrize("base", [3, 4, 124, 255, 380])
def test_prefill_and_decode_agree_at_every_residue(make_stack, kind, base):
    for length in range(base, base + 4):
        stack = make_stack([KINDS[kind]], length=400)
        projected = project(stack, stack.layers[0], length)
        whole = run_alone(stack, stack.layers[0], projected, [length])
        stack = make_stack([KINDS[kind]], length=400)
        parts = run_alone(stack, stack.layers[0], projected, [length - 1, 1])
        torch.testing.assert_close(parts[-1], whole[-1], **CLOSE)


@kinds
@pytest.mark.parametrize("accepted", range(6))
@pytest.mark.parametrize("start", [4, 5, 6, 7, 125, 128, 130])
def test_rejected_drafts_leave_no_trace(make_stack, kind, accepted, start):
    drafts = 5
    serial = make_stack([KINDS[kind]], length=160)
    layer = serial.layers[0]
    total = start + accepted + 2
    projected = project(serial, layer, total)
    wrong = project(serial, layer, start + drafts + 1, seed=9)
    expected = run_alone(serial, layer, projected, [start] + [1] * (accepted + 2))
    stack = make_stack([KINDS[kind]], length=160, decode_query_len=drafts + 1)
    layer = stack.layers[0]
    run_alone(stack, layer, projected, [start])
    draft = rows_of(wrong, slice(start, start + drafts + 1))
    for name, value in vars(draft).items():
        if value is not None:  # the accepted drafts are those that the serial run decoded
            value[:accepted] = getattr(projected, name)[start : start + accepted]
    step = stack.plan([start], [drafts + 1])
    assert step.num_decode_tokens == drafts + 1
    out = attend(stack, layer, draft, step)
    torch.testing.assert_close(out[:accepted], expected[start : start + accepted], **CLOSE)
    for position in range(start + accepted, total):
        step = stack.plan([position], [1])
        out = attend(stack, layer, rows_of(projected, slice(position, position + 1)), step)
        torch.testing.assert_close(out[0], expected[position], **CLOSE)


def test_going_back_further_than_the_rings_keep_is_refused(make_stack):
    stack = make_stack([1], requests=2, length=160, decode_query_len=3)
    stack.plan([0, 0], [100, 20])
    stack.plan([97, 20], [3, 1])
    with pytest.raises(CacheError) as error:
        stack.plan([96, 21], [1, 1])
    assert str(error.value) == (
        "request 0 goes back from 100 tokens to 96, and its rings keep enough for 3 rejected tokens; raise "
        "decode_query_len or begin at 0."
    )
    stack.plan([0, 21], [5, 1])
    stack.release(1)
    assert all((table.block_table[1] == -1).all() for table in stack.pools.tables.all())


def test_hidden_states_of_another_step_are_refused(make_stack):
    stack = make_stack([0], length=32)
    step = stack.plan([0], [3])
    with pytest.raises(CacheError) as error:
        stack.attend(stack.layers[0], hidden_states(5), step)
    assert str(error.value) == (
        "layers.0 was given hidden states [5, 256], and the step has 3 tokens of 256; pass one row a token."
    )
    with pytest.raises(CacheError, match="the step has 2 requests, and max_requests is 1; split it or raise"):
        stack.plan([0, 0], [1, 1])
    with pytest.raises(CacheError, match="the step has 2 query lengths and 1 computed lengths; pass one"):
        stack.plan([0], [1, 1])


def test_a_warm_up_leaves_nothing_behind(make_stack):
    stack = make_stack([1], length=64)
    stack.warm_up()
    assert all((table.block_table == -1).all() for table in stack.pools.tables.all())
    projected = project(stack, stack.layers[0], 20)
    fresh = make_stack([1], length=64)
    assert torch.equal(
        run_alone(stack, stack.layers[0], projected, [20]), run_alone(fresh, fresh.layers[0], projected, [20])
    )


@kinds
def test_stale_bytes_anywhere_never_matter(make_stack, kind):
    clean = make_stack([KINDS[kind]], requests=2, length=300)
    projected = project(clean, clean.layers[0], 290)
    expected = run_alone(clean, clean.layers[0], projected, [200, 90])
    dirty = make_stack([KINDS[kind]], requests=2, length=300)
    for cache in vars(dirty.pools.layers[KINDS[kind]]).values():
        if cache is not None:
            cache.pool.fill_(math.nan)
    assert torch.equal(run_alone(dirty, dirty.layers[0], projected, [200, 90]), expected)


@kinds
def test_nan_in_one_request_stays_there(make_stack, kind):
    stack = make_stack([KINDS[kind]], requests=2, length=200)
    layer = stack.layers[0]
    x = hidden_states(400)
    step = stack.plan([0, 0], [200, 200])
    expected, _ = stack.attend(layer, x, step)
    x[:200] = math.nan
    out, _ = stack.attend(layer, x, stack.plan([0, 0], [200, 200]))
    assert out[:200].isnan().all()
    torch.testing.assert_close(out[200:], expected[200:], atol=1e-4, rtol=1e-4)


@kinds
@pytest.mark.parametrize(
    ("formats", "dtype"),
    [(("fp8_ds_mla", "fp8"), "bfloat16"), (("bf16", "bf16"), "bfloat16"), (("fp8_e4m3", "fp8"), "float32"),
     (("fp8_ds_mla", "fp8"), "float32")],
)  # fmt: skip
def test_output_is_attention_over_the_decoded_bytes(make_stack, checkpoint, kind, formats, dtype):
    length = 300
    stack = make_stack([KINDS[kind]], length=length, kv=formats[0], index=formats[1], dtype=dtype)
    layer, caches = stack.layers[0], stack.pools.layers[KINDS[kind]]
    attention = layer.attention
    x = hidden_states(length, dtype=getattr(torch, dtype))
    step = stack.plan([0], [length])
    out, selected = stack.attend(layer, x, step)
    weights = checkpoint.layer(KINDS[kind], max_positions=length)
    projected = attention.project(x)
    q = attention.insert_kv(projected, caches, step).double()
    sinks = weights["attn_sink"].data.double()
    wo_a = ops.prepare_linear(weights["wo_a"]).data.double().unflatten(0, (8, -1))
    wo_b = ops.prepare_linear(weights["wo_b"]).data.double()
    for t in (0, 3, 127, 128, 255, 299):
        positions = torch.arange(max(0, t - 127), t + 1)
        rows = [caches.window.read(_slots(stack.pools.tables.window, positions, 64))]
        count = layer.spec.kind.visible_entries(t + 1)
        entries = torch.arange(count) if selected is None else selected[t][selected[t] >= 0].long()
        if selected is not None:
            assert len(entries) == min(64, count)
        if len(entries):
            page = caches.compressed.page_size
            rows.append(caches.compressed.read(_slots(stack.pools.tables.context, entries, page)))
        keys = torch.cat(rows).double()
        scores = q[t] @ keys.T * 512**-0.5
        share = (scores - torch.logaddexp(scores.logsumexp(-1), sinks)[:, None]).exp()
        dense = rotate_back((share @ keys)[None].float(), torch.tensor([t]), weights.rope)[0].double()
        low = torch.einsum("gk,grk->gr", dense.reshape(8, -1), wo_a)
        expected = wo_b @ low.flatten()
        error = (out[t].double() - expected).norm() / expected.norm()
        assert error < (1e-2 if dtype == "bfloat16" else 1e-5)


def _slots(table, rows, page_size):
    return table.block_table[0, rows // page_size].long() * page_size + rows % page_size


@kinds
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_partial_sums_of_ranks_add_up(make_stack, kind, ranks):
    stack = make_stack([KINDS[kind]], length=150)
    x = hidden_states(150)
    expected, _ = stack.attend(stack.layers[0], x, stack.plan([0], [150]))
    total = torch.zeros_like(expected)
    for rank in range(ranks):
        stack = make_stack([KINDS[kind]], length=150, rank=rank, ranks=ranks)
        total += stack.attend(stack.layers[0], x, stack.plan([0], [150]))[0]
    torch.testing.assert_close(total, expected, **CLOSE)


def test_sinks_of_a_rank_are_its_own(checkpoint):
    whole = checkpoint.layer(1, max_positions=8)["attn_sink"].data
    for rank in range(8):
        assert torch.equal(
            checkpoint.layer(1, rank, 8, max_positions=8)["attn_sink"].data, whole[2 * rank : 2 * rank + 2]
        )


def test_entries_that_another_layer_chose(make_stack):
    stack = make_stack([1], length=400)
    layer, x = stack.layers[0], hidden_states(400)
    step = stack.plan([0], [400])
    out, selected = stack.attend(layer, x, step)
    again, same = stack.attend(layer, x, step, selected)
    assert torch.equal(out, again)
    assert same is selected
    other = torch.full_like(selected, -1)
    assert not torch.allclose(stack.attend(layer, x, step, other)[0][300:], out[300:])


def test_a_captured_step_never_takes_the_short_cut(make_stack, monkeypatch):
    """A graph captured on a short step is replayed on longer ones."""
    calls = []
    monkeypatch.setattr(ops, "index_topk", lambda *args: calls.append(args) or index_topk(*args))
    index_topk = ops.indexer.index_topk
    stack = make_stack([1], length=600)
    layer, x = stack.layers[0], hidden_states(20)
    step = stack.plan([0], [20])
    _, expected = stack.attend(layer, x, step)
    assert calls == []
    monkeypatch.setattr(layer.attention, "_graph", True)
    _, selected = stack.attend(layer, x, step)
    assert len(calls) == 1
    assert torch.equal(selected, expected)


def test_short_contexts_choose_all_entries_as_the_indexer_would(make_stack):
    stack = make_stack([1], length=300)
    layer, x = stack.layers[0], hidden_states(256)
    step = stack.plan([0], [256])
    stack.attend(layer, x, step)
    projected, caches = layer.attention.project(x), stack.pools.layers[1]
    shortcut = layer.attention.select(projected, caches, step, None)
    full = layer.attention.select(projected, caches, replace(step, host_lengths=None), None)
    assert torch.equal(shortcut, full)
    assert (C4A.visible_entries(256), C128A.visible_entries(255)) == (64, 1)


@pytest.mark.parametrize("length", [255, 256, 259, 260, 264, 300])
def test_chosen_entries_are_those_with_the_highest_scores(make_stack, length):
    """Around the length at which the first of 64 entries has to be dropped."""
    stack = make_stack([1], length=300)
    layer, x = stack.layers[0], hidden_states(length)
    step = stack.plan([0], [length])
    _, selected = stack.attend(layer, x, step)
    projected, caches = layer.attention.project(x), stack.pools.layers[1]
    entries = torch.arange(length // 4)
    keys = caches.index.read(_slots(stack.pools.tables.context, entries, 64)).double()
    q = rotate(projected.index_q, step.positions, layer.attention.rope).double()
    weights = projected.index_weights.double()
    for position in range(length - 12, length):
        visible = (position + 1) // 4
        scores = weights[position] @ (q[position] @ keys[:visible].T).relu()
        best = scores.topk(min(64, visible)).indices.sort().values
        chosen = selected[position]
        assert chosen[chosen >= 0].tolist() == best.tolist()
        assert (chosen[len(best) :] == -1).all()


def test_the_window_ring_is_just_long_enough(make_stack):
    """127 tokens before a chunk of 66 are the 193rd row: one row less would not need the fourth page."""
    length, chunk = 330, 66
    whole = make_stack([0], length=length)
    projected = project(whole, whole.layers[0], length)
    expected = run_alone(whole, whole.layers[0], projected, [length])
    stack = make_stack([0], length=length, max_query_len=chunk)
    assert stack.pools.tables.window.num_pages == 4
    out = run_alone(stack, stack.layers[0], projected, [chunk] * 5)
    torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("kind", ["c4a", "c128a"])
def test_the_state_ring_wraps_many_times(make_stack, kind):
    length = 700
    whole = make_stack([KINDS[kind]], length=length)
    projected = project(whole, whole.layers[0], length)
    expected = run_alone(whole, whole.layers[0], projected, [length])
    stack = make_stack([KINDS[kind]], length=length, max_query_len=300)
    chunks = [300, 1, 1, 1, 5, 131, *[1] * 11, 250]
    out = run_alone(stack, stack.layers[0], projected, chunks)
    torch.testing.assert_close(out, expected, **CLOSE)


def test_a_long_prefill_chooses_in_turns(make_stack, monkeypatch):
    stack = make_stack([1], length=600)
    layer, x = stack.layers[0], hidden_states(500)
    step = stack.plan([0], [500])
    projected, caches = layer.attention.project(x), stack.pools.layers[1]
    layer.attention.compress(projected, caches, step)
    whole = layer.attention.select(projected, caches, step, None)
    calls = []
    monkeypatch.setattr(ops, "index_logits", lambda *args: calls.append(args) or index_logits(*args))
    index_logits = ops.indexer.index_logits
    monkeypatch.setattr("dsv4core.attention.LOGITS", 128 * 64)  # scores of 64 queries
    assert torch.equal(layer.attention.select(projected, caches, step, None), whole)
    assert [len(q) for q, *_ in calls] == [64] * 7 + [52]
