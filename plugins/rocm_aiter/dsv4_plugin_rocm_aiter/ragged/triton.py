"""`ragged_lists` in two launches and a sum: a program counts, then writes, one query's list."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_plugin_rocm_aiter.ragged.reference import RaggedLists

COLUMNS = 1024
"""Columns that a program looks at together."""


def ragged_lists(
    slots: torch.Tensor,
    lengths: torch.Tensor | None,
    table_rows: torch.Tensor | None,
    least: int,
    lists: RaggedLists,
) -> RaggedLists:
    """As the definition."""
    tokens = len(slots) if table_rows is None else len(table_rows)
    starts = lists.starts[: tokens + 1]
    if tokens:
        rows = (slots, lengths, table_rows, *slots.shape, slots.stride(0))
        columns = min(COLUMNS, triton.next_power_of_2(max(slots.shape[1], 16)))
        _count[(tokens,)](*rows, starts, least, COLUMNS=columns)
        starts[1:].cumsum_(0)
        _write[(tokens,)](*rows, starts, lists.indices, COLUMNS=columns)
    return RaggedLists(lists.indices, starts)


@triton.jit
def _place(token, lengths, table_rows, rows, width):
    """A query's row of the table, and how many of its columns count."""
    row, length = token, width
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + token), 0), width).to(tl.int32)
    if table_rows is not None:
        row = tl.load(table_rows + token).to(tl.int64)
        length = tl.where((row >= 0) & (row < rows), length, 0)
    return row, length


@triton.jit
def _count(slots, lengths, table_rows, rows, width, stride, starts, least, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row, length = _place(token, lengths, table_rows, rows, width)
    count = tl.zeros((), tl.int32)
    for begin in range(0, length, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        slot = tl.load(slots + row * stride + column, mask=column < length, other=-1)
        count += tl.sum((slot >= 0).to(tl.int32), 0)
    tl.store(starts + token + 1, tl.maximum(count, least))


@triton.jit
def _write(slots, lengths, table_rows, rows, width, stride, starts, indices, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row, length = _place(token, lengths, table_rows, rows, width)
    begin_at, end_at = tl.load(starts + token), tl.load(starts + token + 1)
    done = tl.zeros((), tl.int32)
    for begin in range(0, length, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        slot = tl.load(slots + row * stride + column, mask=column < length, other=-1)
        valid = slot >= 0
        place = begin_at + done + tl.cumsum(valid.to(tl.int32), 0) - 1
        tl.store(indices + place, slot, mask=valid)
        done += tl.sum(valid.to(tl.int32), 0)
    if done == 0:
        tl.store(indices + begin_at, -1, mask=end_at > begin_at)
