"""One step's batch, as hooks see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv4core.api.selection import Limits

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class CacheTable:
    """Where the rows of one group of caches lie. Layers of one kind share it.

    Attributes:
        block_table: `[requests, pages]` int32: physical page of each logical page, negative for none. Columns
            that no query of the step reaches, before its window or behind its length, may hold
            anything. It may be a slice of a wider buffer: only its last stride is 1.
        slot_mapping: `[tokens]` int64: slot that each token writes, -1 for nothing. For compressed caches
            this is the slot of the entry that the token completes.
        page_size: Rows a page. Slot = page * page_size + offset.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    page_size: int


@dataclass(frozen=True)
class HostLengths:
    """A step's lengths as Python integers: `query` tokens and `total` tokens of each request."""

    query: tuple[int, ...]
    total: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Step:
    """One step. Decode requests come first; a request may have no query token at all.

    All tensors are views of buffers that live as long as the host's step object and keep their strides, so
    a captured graph reads the values of the step it is replayed for. Behind the views of `dsv4core.step`'s
    own buffers, rows of padding have slot and page -1 and length 0; position and request are 0, which is safe
    to look up. An engine's buffers may hold there what earlier steps left.

    Attributes:
        positions: `[tokens]` int64, absolute and 0-based.
        token_to_request: `[tokens]` int32.
        query_start_loc: `[requests + 1]` int32, cumulative query lengths.
        seq_lens: `[requests]` int32, tokens of each request with this step's included.
        num_decode_requests: Requests at the front that are decodes.
        num_decode_tokens: Their query tokens.
        window: Table of the window caches.
        compressed: Table of compressed and index caches by layer kind's name.
        state: Table of compressor-state caches by layer kind's name. Rows of this step's own tokens come from
            the projections; the pool holds those that earlier steps left. Empty at the kernel seam, where
            `compressed` may hold the planned kind only.
        limits: The limits that buffers were made for.
        host_lengths: Lengths on the host, None where the host has none.
    """

    positions: torch.Tensor
    token_to_request: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_decode_requests: int
    num_decode_tokens: int
    window: CacheTable
    compressed: Mapping[str, CacheTable]
    state: Mapping[str, CacheTable]
    limits: Limits
    host_lengths: HostLengths | None = None

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return self.positions.shape[0]

    @property
    def num_requests(self) -> int:
        """Requests of the step."""
        return self.seq_lens.shape[0]
