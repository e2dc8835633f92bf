"""Index tables in kernels: one program a block of columns of a query's row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4core.api.kvcache import round_up

COLUMNS = 1024
"""Columns of one program."""


def window_slots(
    positions: torch.Tensor,
    token_to_request: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    window: int,
) -> torch.Tensor:
    """As the definition."""
    slots = _table(positions, window)
    _launch(_window, slots, positions, window, token_to_request, block_table, page_size)
    return slots


def entry_slots(
    selected: torch.Tensor, token_to_request: torch.Tensor, block_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """As the definition."""
    slots = _table(selected, selected.shape[1])
    _launch(_chosen, slots, selected, selected.stride(0), token_to_request, block_table, page_size)
    return slots


def visible_slots(
    visible: torch.Tensor,
    token_to_request: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    width: int,
) -> torch.Tensor:
    """As the definition."""
    slots = _table(visible, width)
    _launch(_all, slots, visible, width, token_to_request, block_table, page_size)
    return slots


def query_lengths(
    positions: torch.Tensor, window: int, ratio: int | None = None, most: int = 0
) -> tuple[torch.Tensor, ...]:
    """As the definition, in one launch."""
    count = 1 if ratio is None else 3
    lengths = torch.empty(count, len(positions), dtype=torch.int32, device=positions.device)
    if len(positions):
        _lengths[(triton.cdiv(len(positions), COLUMNS),)](
            positions, lengths, len(positions), window, ratio, most, COLUMNS=COLUMNS
        )
    return lengths.unbind()


def visible_entries(visible: torch.Tensor, width: int) -> torch.Tensor:
    """As the definition."""
    entries = _table(visible, width)
    if entries.numel():
        _numbers[_grid(entries)](visible, entries, width, COLUMNS=COLUMNS)
    return entries


def gathered_indices(
    selected: torch.Tensor | None,
    positions: torch.Tensor,
    token_to_request: torch.Tensor,
    first_token: torch.Tensor,
    entries: int,
    rows: int,
    window: int,
    visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the definition."""
    most = 0 if selected is None and visible is None else entries if selected is None else selected.shape[1]
    table = _table(positions, round_up(most + window, 128))
    lengths = torch.empty(positions.shape[0], dtype=torch.int32, device=positions.device)
    if lengths.numel():
        _gathered[(positions.shape[0],)](
            selected,
            0 if selected is None else selected.stride(0),
            visible,
            positions,
            token_to_request,
            first_token,
            table,
            lengths,
            most,
            entries,
            rows,
            window,
            table.shape[1],
            COLUMNS=COLUMNS,
        )
    return table, lengths


def mixed_sparse_indices(
    window: torch.Tensor,
    compressed: torch.Tensor | None,
    window_page: tuple[int, int],
    compressed_page: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the definition."""
    first, chosen = window.shape[1], 0 if compressed is None else compressed.shape[1]
    table = _table(window, first + round_up(chosen, 4))
    lengths = torch.empty(window.shape[0], dtype=torch.int32, device=window.device)
    if lengths.numel():
        _mixed[(window.shape[0],)](
            window,
            compressed,
            table,
            lengths,
            first,
            chosen,
            table.shape[1],
            window.stride(0),
            0 if compressed is None else compressed.stride(0),
            *window_page,
            *compressed_page,
            COLUMNS=COLUMNS,
        )
    return table, lengths


def _table(rows: torch.Tensor, width: int) -> torch.Tensor:
    return torch.empty(rows.shape[0], width, dtype=torch.int32, device=rows.device)


def _grid(table: torch.Tensor) -> tuple[int, int]:
    return table.shape[0], triton.cdiv(table.shape[1], COLUMNS)


def _launch(
    kernel: Any,
    slots: torch.Tensor,
    source: torch.Tensor,
    size: int,
    token_to_request: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
) -> None:
    if slots.numel():
        kernel[_grid(slots)](
            source,
            size,
            token_to_request,
            block_table,
            slots,
            slots.shape[1],
            *block_table.shape,
            block_table.stride(0),
            page_size,
            COLUMNS=COLUMNS,
        )


@triton.jit
def _window(
    positions, window, requests, table, slots, width, rows, pages, stride, page_size, COLUMNS: tl.constexpr
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    position = tl.load(positions + token)
    number = tl.maximum(position - window + 1, 0) + column
    number = tl.where(number <= position, number, -1)
    _store_slots(number, token, column, requests, table, slots, width, rows, pages, stride, page_size)


@triton.jit
def _chosen(
    selected, row, requests, table, slots, width, rows, pages, stride, page_size, COLUMNS: tl.constexpr
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.load(selected + token * row + column, mask=column < width, other=-1)
    _store_slots(number, token, column, requests, table, slots, width, rows, pages, stride, page_size)


@triton.jit
def _all(visible, most, requests, table, slots, width, rows, pages, stride, page_size, COLUMNS: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.where(column < tl.load(visible + token), column, -1)
    _store_slots(number, token, column, requests, table, slots, width, rows, pages, stride, page_size)


@triton.jit(do_not_specialize=["most", "entries", "rows"])
def _gathered(
    selected,
    row,
    visible,
    positions,
    requests,
    first,
    table,
    lengths,
    most,
    entries,
    rows,
    window,
    width,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position, request = tl.load(positions + token), tl.load(requests + token).to(tl.int64)
    known = tl.minimum(position + 1, window)
    chosen = tl.zeros((), tl.int64)
    if selected is not None:
        for begin in range(0, most, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            valid = tl.load(selected + token * row + column, mask=column < most, other=-1) >= 0
            chosen += tl.sum(valid.to(tl.int64), 0)
    elif visible is not None:
        chosen += tl.minimum(tl.load(visible + token), most)
    oldest = entries + position - known + 1 - tl.load(first + request)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        number = column.to(tl.int64)
        if selected is not None:
            number = tl.load(selected + token * row + column, mask=column < chosen, other=-1).to(tl.int64)
        number = tl.where(column < chosen, number, oldest + column - chosen)
        place = tl.where(column < chosen + known, request * rows + number, -1)
        tl.store(table + token * width + column, place.to(tl.int32), mask=column < width)
    tl.store(lengths + token, (chosen + known).to(tl.int32))


@triton.jit
def _store_slots(number, token, column, requests, table, slots, width, rows, pages, stride, page_size):
    """Slots of a request's rows by number; -1 where number, request or page is none."""
    request = tl.load(requests + token).to(tl.int64)
    place = number // page_size
    known = (number >= 0) & (place < tl.where((request >= 0) & (request < rows), pages, 0))
    page = tl.load(table + request * stride + place, mask=known, other=-1)
    slot = tl.where(page >= 0, page * page_size + (number % page_size).to(tl.int32), -1)
    tl.store(slots + token * width + column, slot, mask=column < width)


@triton.jit(do_not_specialize=["count", "window", "most"])
def _lengths(positions, lengths, count, window, ratio, most, COLUMNS: tl.constexpr):
    token = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = token < count
    seen = tl.maximum(tl.load(positions + token, mask=here, other=0) + 1, 0).to(tl.int32)
    tl.store(lengths + token, tl.minimum(seen, window), mask=here)
    if ratio is not None:
        entries = seen // ratio
        tl.store(lengths + count + token, entries, mask=here)
        tl.store(lengths + 2 * count + token, tl.minimum(entries, most), mask=here)


@triton.jit
def _numbers(visible, entries, width, COLUMNS: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.where(column < tl.load(visible + token), column, -1)
    tl.store(entries + token * width + column, number, mask=column < width)


@triton.jit
def _mixed(
    window,
    compressed,
    table,
    lengths,
    first,
    chosen,
    width,
    window_stride,
    compressed_stride,
    window_page,
    window_span,
    compressed_page,
    compressed_span,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = table + token * width
    length = first
    for begin in range(0, first, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        slot = tl.load(window + token * window_stride + column, mask=column < first, other=-1)
        tl.store(row + column, _spanned(slot, window_page, window_span), mask=column < first)
    for begin in range(0, width - first, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        slot = tl.full((COLUMNS,), -1, tl.int32)
        if compressed is not None:
            slot = tl.load(compressed + token * compressed_stride + column, mask=column < chosen, other=-1)
        length += tl.sum((slot >= 0).to(tl.int32))
        target = row + first + column
        tl.store(target, _spanned(slot, compressed_page, compressed_span), mask=column < width - first)
    tl.store(lengths + token, length)


@triton.jit
def _spanned(slot, page_size, span):
    return tl.where(slot >= 0, slot // page_size * span + slot % page_size, -1)
