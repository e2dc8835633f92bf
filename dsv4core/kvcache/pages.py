"""Which pages belong to which request: block tables over a pool, kept on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4core.api.errors import CacheError


@dataclass(frozen=True)
class PageGroup:
    """The caches that share one block table, and how many pages a request needs of them.

    Attributes:
        name: For messages: `window`, `context`, `state c4a`, …
        page_tokens: Raw tokens that one page stands for.
        ring_tokens: For caches of recent tokens only: how many a request keeps. Its pages are then used in
            turn, whatever its length. None keeps everything.
    """

    name: str
    page_tokens: int
    ring_tokens: int | None = None

    def logical_pages(self, length: int) -> int:
        """Entries of the block table that a request of `length` tokens uses."""
        return -(-length // self.page_tokens)

    def held_pages(self, length: int) -> int:
        """Pages of the pool that a request of `length` tokens holds."""
        return self.logical_pages(length if self.ring_tokens is None else min(length, self.ring_tokens))


class PagedTable:
    """The block tables of one page group and the free pages of its pools.

    Attributes:
        group: What a page stands for.
        num_pages: Pages of the pools, those before `first_page` included.
        block_table: `[max_requests, logical_pages]` int32 on the host; -1 where a request has no page.
    """

    def __init__(
        self, group: PageGroup, num_pages: int, max_requests: int, max_model_len: int, first_page: int = 0
    ) -> None:
        """Begin with all pages free but those before `first_page`, which nobody gets."""
        self.group = group
        self.num_pages = num_pages
        shape = (max_requests, group.logical_pages(max_model_len))
        self.block_table = torch.full(shape, -1, dtype=torch.int32)
        self._free = list(range(num_pages - 1, first_page - 1, -1))
        self._held: list[list[int]] = [[] for _ in range(max_requests)]
        self._filled = [0] * max_requests

    @property
    def free_pages(self) -> int:
        """Pages that no request holds."""
        return len(self._free)

    def missing_pages(self, request: int, length: int) -> int:
        """Pages that `request` has to be given before it can have `length` tokens.

        Raises:
            CacheError: The block table has no room for `length` tokens.
        """
        room = self.block_table.shape[1] * self.group.page_tokens
        if length > room:
            raise CacheError(
                f"request {request} asks for {length} tokens in the {self.group.name} cache, and its block "
                f"table has room for {room}; raise max_model_len or shorten the request."
            )
        return max(0, self.group.held_pages(length) - len(self._held[request]))

    def grow(self, request: int, length: int) -> None:
        """Give `request` the pages that `length` tokens need; those that it has stay.

        Raises:
            CacheError: The table or the pool has no room for them. Nothing changes then.
        """
        missing = self.missing_pages(request, length)
        if missing > len(self._free):
            raise CacheError(
                f"request {request} needs {missing} more pages of the {self.group.name} cache for {length} "
                f"tokens, and {len(self._free)} are free; make the pool larger or run fewer requests."
            )
        held = self._held[request]
        held.extend(self._free.pop() for _ in range(missing))
        first, end = self._filled[request], self.group.logical_pages(length)
        if end > first:
            turn = torch.arange(first, end) % len(held)
            self.block_table[request, first:end] = torch.tensor(held, dtype=torch.int32)[turn]
            self._filled[request] = end

    def release(self, request: int) -> None:
        """Take back all pages of `request`."""
        self._free.extend(reversed(self._held[request]))
        self._held[request].clear()
        self._filled[request] = 0
        self.block_table[request] = -1
