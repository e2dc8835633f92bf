"""Index tables against golden vectors."""

import torch

from dsv4core.api import C4A, C128A
from dsv4core.ops import (
    entry_slots,
    gathered_indices,
    mixed_sparse_indices,
    query_lengths,
    visible_entries,
    window_slots,
)
from dsv4core.step import GatherChunk, entry_slot_mapping, gathered_tokens, plan_gather


def test_window_of_the_mixed_table_example():
    table, requests = torch.tensor([[7, 2, 5]], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    window = window_slots(torch.tensor([9]), requests, table, page_size=4, window=4)
    assert window.tolist() == [[10, 11, 20, 21]]
    entries = entry_slots(
        torch.tensor([[0, 1, -1, -1, -1, -1]], dtype=torch.int32), requests, torch.tensor([[3]]), 2
    )
    mixed, lengths = mixed_sparse_indices(window, entries, (4, 4), (2, 2))
    assert mixed.tolist() == [[10, 11, 20, 21, 6, 7, -1, -1, -1, -1, -1, -1]]
    assert lengths.tolist() == [6]


def test_window_only_table_counts_all_its_columns():
    zero = torch.zeros(1, dtype=torch.int32)
    window = window_slots(torch.tensor([3]), zero, torch.tensor([[0]], dtype=torch.int32), 4, 4)
    window = torch.nn.functional.pad(window, (0, 4), value=-1)  # a table of 8 columns for a window of 4
    mixed, lengths = mixed_sparse_indices(window, None, (4, 4), (4, 4))
    assert mixed.tolist() == [[0, 1, 2, 3, -1, -1, -1, -1]]
    assert lengths.tolist() == [8]


def test_page_spans():
    # Pages of 64 rows that are 80 rows apart: logical 63, 64, 130 -> rows 63, 80, 162.
    slots = torch.tensor([[63, 64, 130, -1]], dtype=torch.int32)
    mixed, _ = mixed_sparse_indices(slots, slots, (64, 80), (64, 100))
    assert mixed.tolist() == [[63, 80, 162, -1, 63, 100, 202, -1]]


def test_window_grows_to_its_size_and_then_slides():
    positions = torch.tensor([0, 1, 5, 200])
    requests, table = torch.zeros(4, dtype=torch.int32), torch.arange(10, dtype=torch.int32)[None]
    found = window_slots(positions, requests, table, 64, 4)
    assert found.tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [2, 3, 4, 5], [197, 198, 199, 200]]


def test_padding_rows_and_freed_pages_have_no_slots():
    requests, table = torch.tensor([0, 0], dtype=torch.int32), torch.tensor([[-1, 3]], dtype=torch.int32)
    assert window_slots(torch.tensor([-1, 4]), requests, table, 4, 3).tolist() == [[-1] * 3, [-1, -1, 12]]


def test_c128a_example():
    positions = torch.tensor([255, 511, 383, 639])
    requests = torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    local = visible_entries((positions + 1) // C128A.ratio, 8)
    assert local[2:, :4].tolist() == [[0, 1, 2, -1], [0, 1, 2, 3]]
    slots = entry_slots(local[:2], requests[:2], torch.tensor([[3], [5]], dtype=torch.int32), page_size=512)
    assert slots.tolist() == [[1536, 1537] + [-1] * 6, [2560, 2561, 2562, 2563] + [-1] * 4]


def test_gathered_indices_example():
    # Window 4, ratio 4; requests of 10 tokens (3 of them queries) and 5 (all queries): N = 2, M = 8.
    first_token = torch.tensor([10 - gathered_tokens(3, 10, 4), 5 - gathered_tokens(5, 5, 4)])
    chunk = next(plan_gather([3, 5], [10, 5], C4A, 4, 1000))
    assert (first_token.tolist(), chunk) == ([4, 0], GatherChunk(0, 2, entries=2, rows=8))
    selected = torch.tensor([[1, 0], [-1, -1]], dtype=torch.int32)
    table, lengths = gathered_indices(
        selected, torch.tensor([7, 2]), torch.tensor([0, 1]), first_token, chunk.entries, chunk.rows, 4
    )
    assert table.shape == (2, 128)
    assert table[0, :7].tolist() == [1, 0, 2, 3, 4, 5, -1]
    assert table[1, :4].tolist() == [10, 11, 12, -1]
    assert lengths.tolist() == [6, 3]
    table, lengths = gathered_indices(None, torch.tensor([7]), torch.tensor([0]), first_token, 0, 6, 4)
    assert (table[0, :5].tolist(), lengths.tolist()) == ([0, 1, 2, 3, -1], [4])


def test_out_of_range_rows_and_entries_become_nothing():
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    selected = torch.tensor([[0, 5], [1, 12], [2, 3]], dtype=torch.int32)
    slots = entry_slots(selected, torch.tensor([0, 1, 2], dtype=torch.int32), table, page_size=4)
    assert slots.tolist() == [[0, 5], [13, -1], [-1, -1]]


def test_compressed_slot_mapping_example():
    # 240 computed and 40 new tokens at ratio 4, pages [5, 7] of 64 entries.
    positions = torch.arange(240, 280)
    slots = entry_slot_mapping(
        torch.tensor([[5, 7]], dtype=torch.int32), torch.zeros(40, dtype=torch.int64), positions, C4A, 64
    )
    assert slots[3::4].tolist() == [5 * 64 + i for i in range(60, 64)] + [7 * 64 + i for i in range(6)]
    assert (slots[[i for i in range(40) if i % 4 != 3]] == -1).all()
    assert slots.dtype == torch.int64


def test_lengths_of_queries() -> None:
    window, visible, attended = query_lengths(torch.tensor([-1, 0, 3, 7, 200]), 5, ratio=4, most=2)
    assert window.tolist() == [0, 1, 4, 5, 5]
    assert visible.tolist() == [0, 0, 1, 2, 50]
    assert attended.tolist() == [0, 0, 1, 2, 2]
    (alone,) = query_lengths(torch.tensor([9]), 5)
    assert alone.tolist() == [5]
