"""Steps: their tensors, their persistent buffers, and batches that cannot be."""

import pytest
import torch

from dsv4core.api import C4A, C128A, SWA, CacheError, Limits, PageSizes
from dsv4core.step import Batch, StepBuffers, leading_decodes

LIMITS = Limits(max_tokens=16, max_requests=4, max_model_len=512, max_query_len=12)
PAGES = {"window": 40, "context": 40, "c4a": 40, "c128a": 40}


def table(rows, columns, start=0):
    return torch.arange(start, start + rows * columns, dtype=torch.int32).view(rows, columns) % 40


def batch(computed, query, **changes):
    rows = len(query)
    tables = {
        "window": table(rows, 8),
        "context": table(rows, 2),
        "state": {"c4a": table(rows, 128), "c128a": table(rows, 64)},
    }
    decodes = leading_decodes(tuple(computed), tuple(query), 2)
    return Batch(tuple(computed), tuple(query), **{"num_decode_requests": decodes, **tables, **changes})


@pytest.fixture
def buffers():
    return StepBuffers((SWA, C4A, C128A), LIMITS, PageSizes(), PAGES)


def test_a_mixed_step(buffers):
    step = buffers.build(batch([130, 7, 0, 255], [1, 2, 5, 3]))
    assert step.positions.tolist() == [130, 7, 8, 0, 1, 2, 3, 4, 255, 256, 257]
    assert step.token_to_request.tolist() == [0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3]
    assert step.query_start_loc.tolist() == [0, 1, 3, 8, 11]
    assert step.seq_lens.tolist() == [131, 9, 5, 258]
    assert (step.num_decode_requests, step.num_decode_tokens) == (2, 3)
    assert step.host_lengths.total == (131, 9, 5, 258)
    window = step.window
    assert window.slot_mapping.tolist()[:3] == [2 * 64 + 2, 8 * 64 + 7, 8 * 64 + 8]
    entries = step.compressed["c4a"]
    assert entries.page_size == 64
    done = {i: s for i, s in enumerate(entries.slot_mapping.tolist()) if s >= 0}
    assert done == {1: 2 * 64 + 1, 6: 4 * 64 + 0, 8: 6 * 64 + 63}
    assert [s for s in step.compressed["c128a"].slot_mapping.tolist() if s >= 0] == [6 * 2 + 1]
    assert step.positions.dtype == step.window.slot_mapping.dtype == torch.int64
    assert step.seq_lens.dtype == step.token_to_request.dtype == window.block_table.dtype == torch.int32


def test_states_keep_recent_tokens_only():
    limits = Limits(400, 1, 512, 400)
    buffers = StepBuffers((C4A, C128A), limits, PageSizes(), PAGES, decode_query_len=1)
    step = buffers.build(batch([0], [400]))
    kept = {name: int((t.slot_mapping >= 0).sum()) for name, t in step.state.items()}
    assert kept == {"c4a": 9, "c128a": 129}
    assert (step.state["c4a"].slot_mapping[-9:] >= 0).all()


def test_buffers_keep_their_addresses_and_strides(buffers):
    first = buffers.build(batch([130, 7], [1, 2]))
    pointers = [first.positions.data_ptr(), first.window.block_table.data_ptr()]
    strides = first.window.block_table.stride(), first.state["c4a"].block_table.stride()
    second = buffers.build(batch([500, 1, 0, 0], [1, 1, 3, 4]))
    assert [second.positions.data_ptr(), second.window.block_table.data_ptr()] == pointers
    assert (second.window.block_table.stride(), second.state["c4a"].block_table.stride()) == strides
    assert first.positions[0] == 500  # a view of the same buffer


def test_a_table_that_is_wider_than_the_limits_need(buffers):
    wide = buffers.build(batch([130], [1], window=table(1, 99))).window
    assert wide.block_table.shape == (1, 8)
    assert wide.slot_mapping.tolist() == [2 * 64 + 2]


def test_nothing_of_an_earlier_step_is_left_behind(buffers):
    large = buffers.build(batch([130, 7, 60], [1, 2, 5]))
    slots, pages = large.window.slot_mapping, large.window.block_table
    entries, lengths = large.compressed["c4a"].slot_mapping, large.seq_lens
    buffers.build(batch([3], [1], window=table(1, 1)))
    assert slots.tolist() == [3, *[-1] * 7]
    assert pages[0].tolist() == [0, *[-1] * 7]
    assert (pages[1:] == -1).all()
    assert entries.tolist()[1:] == [-1] * 7
    assert lengths.tolist() == [4, 0, 0]


@pytest.mark.parametrize("query", [[], [0], [0, 0, 0]])
def test_steps_without_tokens(buffers, query):
    step = buffers.build(batch([5] * len(query), query))
    assert (step.num_tokens, step.num_requests) == (0, len(query))
    assert step.seq_lens.tolist() == [5] * len(query)
    assert step.num_decode_tokens == 0


@pytest.mark.parametrize(
    ("computed", "query", "expected"),
    [
        ([], [], 0),
        ([0], [1], 0),
        ([5, 9], [1, 2], 2),
        ([5, 0, 7], [1, 3, 1], 1),
        ([5, 6], [3, 1], 0),
        ([5, 6], [0, 1], 2),
    ],
)
def test_leading_decodes(computed, query, expected):
    assert leading_decodes(tuple(computed), tuple(query), 2) == expected


IMPOSSIBLE = {
    "the step has 13 query tokens of one request, and max_query_len is 12; split it or raise "
    "max_query_len.": (
        ([500], [13]),
        {},
    ),
    "the step has 18 query tokens, and max_tokens is 16; split it or raise max_tokens.": (
        ([0, 0], [9, 9]),
        {},
    ),
    "the step has 5 requests, and max_requests is 4; split it or raise max_requests.": (
        ([1] * 5, [1] * 5),
        {},
    ),
    "the step has 513 tokens in one request, and max_model_len is 512; split it or raise max_model_len.": (
        ([508], [5]),
        {},
    ),
    "lengths cannot be negative: query (1,), computed (-1,).": (([-1], [1]), {}),
    "the step has 2 requests, and the window block table has 3 rows; pass one for every request.": (
        ([1, 1], [1, 1]),
        {"window": table(3, 8)},
    ),
    "the step has no block table for the states of c128a, c4a; pass them, too.": (
        ([1], [1]),
        {"state": {}},
    ),
    "num_decode_requests=2 of 1 requests with computed lengths (5,): a decode has computed tokens, and "
    "decodes come first.": (([5], [1]), {"num_decode_requests": 2}),
    "window block table: it is [1, 8] of int64, and block tables are [requests, pages] of int32; pass it "
    "so.": (
        ([5], [1]),
        {"window": table(1, 8).long()},
    ),
    "window block table: request 0 has no page for position 5, which this step writes; give it one.": (
        ([5], [1]),
        {"window": torch.full((1, 8), -1, dtype=torch.int32)},
    ),
    "context block table: request 0 has no page for position 7, which this step writes; give it one.": (
        ([5], [4]),
        {"context": torch.full((1, 2), -1, dtype=torch.int32)},
    ),
    "context block table: page 0 of request 0 is 77 in the block table, and the pool has 40 pages.": (
        ([100], [5]),
        {"context": torch.tensor([[77]], dtype=torch.int32)},
    ),
    "window block table: request 0 has 105 tokens, which need 2 pages of 64 tokens, and its block table "
    "has 1.": (
        ([100], [5]),
        {"window": table(1, 1)},
    ),
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_impossible_batches(buffers, message):
    lengths, changes = IMPOSSIBLE[message]
    with pytest.raises(CacheError) as error:
        buffers.build(batch(*lengths, **changes))
    assert str(error.value) == message
