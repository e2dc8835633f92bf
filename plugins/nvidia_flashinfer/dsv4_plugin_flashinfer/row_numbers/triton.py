"""`row_numbers` in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4_plugin_flashinfer.row_numbers.reference import Place
from dsv4core.api import CacheTable

COLUMNS = 1024
"""Columns of one program."""


def row_numbers(
    positions: torch.Tensor,
    token_to_request: torch.Tensor,
    window: CacheTable,
    entries: CacheTable | None,
    selected: torch.Tensor | None,
    places: tuple[Place, Place],
    seen: int,
    ratio: int | None,
    planned: torch.Tensor,
    numbers: torch.Tensor,
    attends: torch.Tensor,
) -> None:
    """As the definition."""
    if not numbers.numel():
        return
    first, second = places
    more = window if entries is None else entries
    tables = [own.block_table for own in (window, more)]
    sizes = [(table, table.stride(0), table.shape[1]) for table in tables]
    _number[(len(positions), triton.cdiv(numbers.shape[1], COLUMNS))](
        *(positions, token_to_request, len(tables[0])),
        *(*sizes[0], window.page_size, first.page, first.row),
        *(*sizes[1], more.page_size, second.first, second.page, second.row),
        *(selected, 0 if selected is None else selected.stride(0)),
        *(
            0 if selected is None else selected.shape[1],
            seen,
            ratio,
            planned,
            numbers,
            numbers.shape[1],
            attends,
        ),
        COLUMNS=COLUMNS,
    )


@triton.jit(do_not_specialize=["more_first", "chosen", "width"])
def _number(
    positions,
    requests,
    height,
    table,
    stride,
    pages,
    page_size,
    page_units,
    row_units,
    more_table,
    more_stride,
    more_pages,
    more_page_size,
    more_first,
    more_page_units,
    more_row_units,
    selected,
    selected_stride,
    chosen,
    seen,
    ratio,
    planned,
    numbers,
    width,
    attends,
    COLUMNS: tl.constexpr,
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    position = tl.load(positions + token)
    request = tl.minimum(tl.maximum(tl.load(requests + token), 0), height - 1).to(tl.int64)
    here = column < width
    window = tl.maximum(tl.minimum(position + 1, seen), 0).to(tl.int32)
    mine = column < window
    number = position - window + 1 + column
    page = number // page_size
    known = tl.load(table + request * stride + page, mask=here & mine & (page < pages), other=-1)
    own = tl.max(tl.where(mine & (column == window - 1), known, -1)) >= 0
    if tl.program_id(1) == 0:
        tl.store(attends + token, (own & (token < tl.load(planned))).to(tl.int32))
    units = tl.maximum(known, 0).to(tl.int64) * page_units + (number % page_size) * row_units
    if ratio is not None:
        entry, theirs = column - window, here & (column >= window)
        if selected is not None:
            theirs = theirs & (entry < chosen)
            entry = tl.load(selected + token * selected_stride + entry, mask=theirs, other=-1)
        entry = tl.maximum(entry, 0)
        page = entry // more_page_size
        theirs = theirs & (page < more_pages)
        known = tl.load(more_table + request * more_stride + page, mask=theirs, other=0)
        more = tl.maximum(known, 0).to(tl.int64) * more_page_units + (entry % more_page_size) * more_row_units
        units = tl.where(mine, units, more + more_first)
    tl.store(numbers + token * width + column, units.to(tl.int32), mask=here)
