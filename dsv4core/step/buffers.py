"""From a host's batch to the tensors of a step, in buffers that keep their addresses."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dsv4core.api.kvcache import PageSizes
from dsv4core.api.model import LayerKind
from dsv4core.api.selection import Limits
from dsv4core.api.step import CacheTable, HostLengths, Step
from dsv4core.kvcache.checks import check_block_table
from dsv4core.step.batch import Batch, check_batch
from dsv4core.step.slots import entry_slot_mapping, slot_mapping, state_slot_mapping


class StepBuffers:
    """Persistent device buffers of one host's steps.

    Each `build` overwrites them: a step is valid until the next one is built. Strides depend on the limits
    only.
    """

    def __init__(
        self,
        kinds: Iterable[LayerKind],
        limits: Limits,
        sizes: PageSizes,
        num_pages: dict[str, int],
        device: torch.device | str = "cpu",
        decode_query_len: int = 1,
    ) -> None:
        """Allocate the buffers.

        Args:
            kinds: Layer kinds of the model.
            num_pages: Pages of the pools by group: `window`, `context`, and each kind's name for its states.
            decode_query_len: Tokens that a rejected draft may take back; states keep as many rows more.
        """
        self.limits, self.sizes = limits, sizes
        self._kinds = {kind.name: kind for kind in kinds if kind.ratio is not None}
        self._num_pages, self._device, self._slack = num_pages, device, decode_query_len
        self._buffers: dict[str, torch.Tensor] = {}

    def build(self, batch: Batch) -> Step:
        """Check a batch and turn it into a step.

        Raises:
            CacheError: A length exceeds a limit, or a block table does not reach as far as the lengths.
        """
        check_batch(batch, self.limits)
        query, total = (
            torch.tensor(batch.query, dtype=torch.int64),
            torch.tensor(batch.total, dtype=torch.int64),
        )
        self._check_tables(batch)
        starts = torch.nn.functional.pad(query.cumsum(0), (1, 0))
        requests = torch.repeat_interleave(torch.arange(len(batch.query)), query)
        positions = torch.arange(int(starts[-1])) - (starts[1:] - total)[requests]
        return Step(
            positions=self._persistent("positions", positions, self.limits.max_tokens),
            token_to_request=self._persistent("requests", requests.int(), self.limits.max_tokens),
            query_start_loc=self._persistent("starts", starts.int(), self.limits.max_requests + 1),
            seq_lens=self._persistent("lengths", total.int(), self.limits.max_requests),
            num_decode_requests=batch.num_decode_requests,
            num_decode_tokens=int(starts[batch.num_decode_requests]),
            window=self._table(
                "window",
                batch.window,
                slot_mapping(batch.window, requests, positions, self.sizes.window),
                self.sizes.window,
            ),
            compressed={k.name: self._entries(k, batch, requests, positions) for k in self._kinds.values()},
            state={k.name: self._state(k, batch, requests, positions, total) for k in self._kinds.values()},
            limits=self.limits,
            host_lengths=HostLengths(batch.query, batch.total),
        )

    def _check_tables(self, batch: Batch) -> None:
        pages, total = self._num_pages, batch.total
        check_block_table(batch.window, total, self.sizes.window, pages["window"], "window block table")
        check_block_table(batch.context, total, self.sizes.context, pages["context"], "context block table")
        for name, kind in self._kinds.items():
            rows, label = self.sizes.state_rows(kind), f"state {name} block table"
            check_block_table(batch.state[name], total, rows, pages[name], label)

    def _entries(
        self, kind: LayerKind, batch: Batch, requests: torch.Tensor, positions: torch.Tensor
    ) -> CacheTable:
        rows = self.sizes.compressed_rows(kind)
        slots = entry_slot_mapping(batch.context, requests, positions, kind, rows)
        return self._table(f"compressed {kind.name}", batch.context, slots, rows)

    def _state(
        self,
        kind: LayerKind,
        batch: Batch,
        requests: torch.Tensor,
        positions: torch.Tensor,
        total: torch.Tensor,
    ) -> CacheTable:
        rows, table = self.sizes.state_rows(kind), batch.state[kind.name]
        kept = kind.state_window + self._slack
        slots = state_slot_mapping(table, requests, positions, total, kept, rows)
        return self._table(f"state {kind.name}", table, slots, rows)

    def _table(self, name: str, table: torch.Tensor, slots: torch.Tensor, page_size: int) -> CacheTable:
        return CacheTable(
            block_table=self._persistent(f"{name} table", table, self.limits.max_requests),
            slot_mapping=self._persistent(f"{name} slots", slots, self.limits.max_tokens),
            page_size=page_size,
        )

    def _persistent(self, name: str, values: torch.Tensor, rows: int) -> torch.Tensor:
        """Copy `values` to the front of the buffer `name`, which is made on first use with `rows` rows."""
        if name not in self._buffers:
            shape = (rows, *values.shape[1:])
            self._buffers[name] = torch.zeros(shape, dtype=values.dtype, device=self._device)
        view = self._buffers[name][: values.shape[0]]
        view.copy_(values)
        return view
