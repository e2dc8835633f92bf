"""Ragged lists in the kernel as the definition has them; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from dsv4_plugin_rocm_aiter import ragged
from dsv4_plugin_rocm_aiter.ragged import RaggedLists
from dsv4_plugin_rocm_aiter.ragged import triton as kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def expected(rows: list[list[int]], least: int) -> tuple[list[int], list[int]]:
    """Valid slots one behind the other, by hand; and where each list begins."""
    flat, starts = [], [0]
    for row in rows:
        valid = [slot for slot in row if slot >= 0]
        flat += valid or [-1] * least
        starts.append(len(flat))
    return flat, starts


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("width", [1, 100, 1500])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lengthy", [False, True])
def test_ragged_lists(width: int, shared: bool, lengthy: bool, least: int) -> None:
    """Holes anywhere, empty rows, lengths beyond both ends, rows that are shared or none."""
    random = torch.Generator().manual_seed(width)
    wide = torch.randint(-40, 4000, (6, width + 3), generator=random).int()
    wide[2], wide[4, ::2] = -1, -7
    slots = wide[:, :width].to(DEVICE)
    owners = torch.tensor([3, 0, 99, 3, -5, 2, 5], dtype=torch.int32) if shared else None
    count = 7 if shared else 6
    lengths = torch.randint(-3, width + 50, (count,), generator=random) if lengthy else None
    rows = []
    for token in range(count):
        row = token if owners is None else int(owners[token])
        length = width if lengths is None else min(max(int(lengths[token]), 0), width)
        rows.append(wide[row, :length].tolist() if 0 <= row < 6 else [])
    flat, starts = expected(rows, least)
    for write in (ragged.ragged_lists, kernel.ragged_lists):
        room = RaggedLists.empty(count + 3, width, DEVICE)
        room.indices.fill_(-9)
        arguments = (None if own is None else own.to(DEVICE) for own in (lengths, owners))
        found = write(slots, *arguments, least, room)
        assert found.starts.tolist() == starts
        assert found.indices.tolist()[: len(flat)] == flat
        assert bool((found.indices[len(flat) :] == -9).all()), "Behind the lists nothing is written."
        assert found.indices.data_ptr() == room.indices.data_ptr()
        assert found.starts.data_ptr() == room.starts.data_ptr()
        part = found.of(slice(2, 5))
        assert part.starts.tolist() == starts[2:6]


def test_no_query() -> None:
    for write in (ragged.ragged_lists, kernel.ragged_lists):
        room = RaggedLists.empty(0, 5, DEVICE)
        slots = torch.empty(0, 5, dtype=torch.int32, device=DEVICE)
        assert write(slots, None, None, 1, room).starts.tolist() == [0]


def test_steps_follow_each_other() -> None:
    """A longer step, then a shorter one in the same buffers: nothing of the first is left in the second."""
    room = RaggedLists.empty(4, 8, DEVICE)
    for write in (ragged.ragged_lists, kernel.ragged_lists):
        for tokens in (4, 2, 3):
            slots = torch.arange(tokens * 8, dtype=torch.int32, device=DEVICE).view(tokens, 8)
            lengths = torch.arange(tokens, device=DEVICE) + 1
            found = write(slots, lengths, None, 0, room)
            flat = [slot for token in range(tokens) for slot in slots[token, : token + 1].tolist()]
            assert found.starts.tolist() == [sum(range(1, n + 1)) for n in range(tokens + 1)]
            assert found.indices[: len(flat)].tolist() == flat
