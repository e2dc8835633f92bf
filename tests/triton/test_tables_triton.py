"""Index tables as the definitions have them, entry by entry."""

from __future__ import annotations

import pytest
import torch

from dsv4core import ops
from dsv4core.ops.sparse_indices import triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POSITIONS = torch.tensor([0, 1, 5, 6, 126, 130, -1, 299], device=DEVICE)
REQUESTS = torch.tensor([0, 1, 2, 2, 2, 0, 0, 1], dtype=torch.int32, device=DEVICE)
VISIBLE = torch.tensor([0, 1, 1299, 40, 0, 7, 8, 1300], device=DEVICE)


def table(page_size: int) -> torch.Tensor:
    """A slice of a wider table, with pages that are missing."""
    pages = -(-1300 // page_size)
    wide = torch.randperm(3 * (pages + 5)).view(3, -1).int().to(DEVICE)
    wide[0, 1] = wide[2, pages - 1] = -1
    return wide[:, :pages]


@pytest.mark.parametrize("page_size", [1, 61, 64])
def test_window(page_size: int) -> None:
    for window in (1, 128):
        arguments = (POSITIONS, REQUESTS, table(page_size), page_size, window)
        assert torch.equal(kernels.window_slots(*arguments), ops.window_slots(*arguments))


@pytest.mark.parametrize("page_size", [2, 64])
def test_chosen_entries(page_size: int) -> None:
    """Holes anywhere, entries beyond the table, requests that are none, rows that are apart."""
    selected = torch.randint(-1, 1400, (8, 600), device=DEVICE).int()[:, :513]
    requests = REQUESTS.clone()
    requests[0], requests[3] = -1, 3
    arguments = (selected, requests, table(page_size), page_size)
    assert torch.equal(kernels.entry_slots(*arguments), ops.entry_slots(*arguments))


def test_all_entries() -> None:
    arguments = (VISIBLE, REQUESTS, table(64), 64, 1301)
    assert torch.equal(kernels.visible_slots(*arguments), ops.visible_slots(*arguments))
    assert torch.equal(kernels.visible_entries(VISIBLE, 1301), ops.visible_entries(VISIBLE, 1301))


@pytest.mark.parametrize("entries", [(), (4, 512), (128, 1), (1, 7)])
def test_lengths(entries: tuple[int, ...]) -> None:
    """Rows of padding see nothing; more queries than one program has."""
    positions = torch.cat((POSITIONS, torch.arange(-1, 5000, device=DEVICE)))
    found, due = (own.query_lengths(positions, 128, *entries) for own in (kernels, ops))
    assert len(found) == len(due) == (3 if entries else 1)
    for one, other in zip(found, due, strict=True):
        assert one.dtype == torch.int32
        assert torch.equal(one, other)


@pytest.mark.parametrize("chosen", [None, 1, 512, 1027])
def test_mixed_table(chosen: int | None) -> None:
    window = torch.randint(-1, 5000, (8, 128), device=DEVICE).int()
    compressed = None if chosen is None else torch.randint(-1, 5000, (8, chosen), device=DEVICE).int()
    arguments = (window, compressed, (64, 73), (16, 16))
    for found, due in zip(
        kernels.mixed_sparse_indices(*arguments), ops.mixed_sparse_indices(*arguments), strict=True
    ):
        assert torch.equal(found, due)


@pytest.mark.parametrize("attended", ["none", "some", "all"])
def test_gathered_table(attended: str) -> None:
    """Rows of a workspace of three requests: nothing, all or some entries in front of the window's tokens."""
    positions, window = POSITIONS.clone(), 128
    first = torch.tensor([0, 100, 0], device=DEVICE)
    positions[1] = 230
    chosen = torch.randint(1300, (8, 1030), device=DEVICE).int()
    chosen = torch.where(torch.arange(1030, device=DEVICE) < VISIBLE[:, None], chosen, -1).int()[:, :1027]
    arguments = (positions, REQUESTS, first, 1300, 1700, window)
    selected = chosen if attended == "some" else None
    visible = VISIBLE if attended == "all" else None
    for found, due in zip(
        kernels.gathered_indices(selected, *arguments, visible),
        ops.gathered_indices(selected, *arguments, visible),
        strict=True,
    ):
        assert torch.equal(found, due)


def test_no_query() -> None:
    nothing = POSITIONS[:0]
    assert kernels.window_slots(nothing, REQUESTS[:0], table(64), 64, 128).shape == (0, 128)
    found, lengths = kernels.mixed_sparse_indices(table(64)[:0], None, (64, 64), (64, 64))
    assert found.shape[0] == lengths.shape[0] == 0
