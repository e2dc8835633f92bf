"""How attention is divided: a long row has many parts, and none of them is much longer than others."""

from __future__ import annotations

import itertools

import pytest
import torch

from dsv4core.api import ConfigError
from dsv4core.kvcache import allocate_cache, cache_layout
from dsv4core.model.shapes import PRESETS
from dsv4core.ops.sparse_mla import Rows, schedule_triton
from dsv4core.ops.sparse_mla import triton as kernels
from dsv4core.ops.sparse_mla.schedule_triton import Items, Table, schedule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEYS, PACKED = schedule_triton.NARROW.keys, {("fp8_ds_mla", "e4m3fn")}


def of_processors(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them has room for two programs of 16 heads."""
    monkeypatch.setattr(schedule_triton, "processors", lambda device: count)
    monkeypatch.setattr(schedule_triton, "_shared_memory", lambda device: 227 << 10)


def divided(
    tables: list[Table], tokens: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Items, list[int]]:
    """The items for 16 heads, of which a processor has two programs; parts of each token."""
    of_processors(room // 2, monkeypatch)
    items = schedule(tokens, 16, tables, PACKED, torch.float16, DEVICE).items
    assert items is not None
    counts = items.firsts.diff().tolist()
    named = [token for token, count in enumerate(counts) for _ in range(count)]
    assert items.tokens.tolist() == named + [tokens] * (tokens + room - len(named))
    kept = 0
    for token, count in enumerate(counts):
        assert count == 1 or items.parts[token] == kept
        kept += count if count > 1 else 0
    assert kept <= items.most_parts
    return items, counts


@pytest.mark.parametrize("room", [2, 6, 132])
@pytest.mark.parametrize("tokens", [1, 5, 70, 150])
def test_parts_are_about_alike(tokens: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long tables of unequal lengths, some of them nonsense: all run at once, and none is much longer."""
    if tokens > schedule_triton.WAVES * room:
        pytest.skip("so many rows stay whole")
    lengths = torch.randint(-3, 3000, (tokens,), device=DEVICE)
    lengths[0] = 0
    _, counts = divided([(128, None), (2000, lengths)], tokens, room, monkeypatch)
    tiles = [4 + -(-min(max(length, 0), 2000) // KEYS) for length in lengths.tolist()]
    assert longest(tiles, counts) <= 1.1 * shortest_possible(tiles, room) + 2


@pytest.mark.parametrize("tokens", [80, 120, 128, 131, 132, 133])
def test_one_long_row_among_as_many_as_there_is_room_for(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 6 tiles and one of 260."""
    lengths = torch.full((tokens,), 2 * KEYS, device=DEVICE)
    lengths[7] = 256 * KEYS
    _, counts = divided([(128, None), (300 * KEYS, lengths)], tokens, 132, monkeypatch)
    tiles = [260 if token == 7 else 6 for token in range(tokens)]
    assert longest(tiles, counts) <= 1.1 * shortest_possible(tiles, 132) + 2


def longest(tiles: list[int], counts: list[int]) -> int:
    return max(-(-own // count) for own, count in zip(tiles, counts, strict=True))


def shortest_possible(tiles: list[int], room: int) -> int:
    """The length of parts, if all of them are to run at once, or their share if they cannot."""
    if len(tiles) > room:
        return -(-sum(tiles) // room)
    return next(span for span in itertools.count(1) if sum(-(-own // span) for own in tiles) <= room)


def test_one_long_row_has_all_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = torch.tensor([32, 32 * 200, 0], device=DEVICE)
    _, counts = divided([(32 * 300, lengths)], 3, 100, monkeypatch)
    assert counts[0] == counts[2] == 1
    assert 60 <= counts[1] <= 98


def test_rows_stay_whole_where_none_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that may be long, and is not."""
    lengths = torch.full((6,), 100, device=DEVICE)
    assert divided([(4000, lengths)], 6, 8, monkeypatch)[1] == [1] * 6


@pytest.mark.parametrize(("tokens", "splits"), [(1, 10), (13, 10), (14, 5), (66, 2), (67, 1), (4000, 1)])
def test_short_rows_are_divided_alike(tokens: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of_processors(66, monkeypatch)
    made = schedule(tokens, 16, [(128, None), (192, None)], PACKED, torch.float16, DEVICE)
    assert made.items is None
    assert made.splits == splits


def test_a_division_of_other_tables_is_refused() -> None:
    cache = allocate_cache(cache_layout(PRESETS["v4_flash"], "bf16", "fp8").window, 2, 64, DEVICE)
    rows = [Rows(cache, torch.zeros(2, 40, dtype=torch.int32, device=DEVICE))]
    q = torch.zeros(2, 16, 512, dtype=torch.float16, device=DEVICE)
    division = kernels.attention_schedule(q, rows)
    message = (
        r"The schedule is of 2 tokens, tables of \(40,\) columns and bf16 rows; these are 1 tokens, tables "
        r"of \(40,\) columns and bf16 rows. Make one with attention_schedule."
    )
    with pytest.raises(ConfigError, match=message):
        kernels.scheduled_sparse_mla(q[:1], [Rows(cache, rows[0].slots[:1])], 1.0, None, False, division)
