"""From a host's batch to the tensors of a step, in buffers that keep their addresses."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dsv4core.api.errors import CacheError
from dsv4core.api.kvcache import PageSizes
from dsv4core.api.model import LayerKind
from dsv4core.api.selection import Limits
from dsv4core.api.step import CacheTable, HostLengths, Step
from dsv4core.kvcache.checks import check_block_table
from dsv4core.step.batch import Batch, check_batch
from dsv4core.step.slots import entry_slot_mapping, slot_mapping, state_slot_mapping


class StepBuffers:
    """Persistent device buffers of one host's steps.

    Each `build` overwrites them: a step is valid until the next one is built. Addresses and strides depend on
    the limits only. Behind a step's own rows, slots and pages are -1 and lengths 0, so that a graph captured
    for a larger step does nothing there.
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

        Raises:
            ConfigError: A context page is not a whole number of entries.
        """
        self.limits, self.sizes = limits, sizes
        self._kinds = {kind.name: kind for kind in kinds if kind.ratio is not None}
        self._num_pages, self._slack = num_pages, decode_query_len
        self._page_tokens = {"window": sizes.window, "context": sizes.context}
        for kind in self._kinds.values():
            sizes.check_kind(kind)
            self._page_tokens[kind.name] = sizes.state_rows(kind)

        def buffer(rows: int, *columns: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((rows, *columns), fill, dtype=dtype, device=device)

        requests, tokens, length = limits.max_requests, limits.max_tokens, limits.max_model_len
        self._positions = buffer(tokens, dtype=torch.int64)
        self._token_to_request = buffer(tokens)
        self._query_start_loc, self._seq_lens = buffer(requests + 1), buffer(requests)
        self._tables = {
            group: buffer(requests, -(-length // page), fill=-1) for group, page in self._page_tokens.items()
        }
        slots = ["window", *(f"{use} {name}" for name in self._kinds for use in ("compressed", "state"))]
        self._slots = {name: buffer(tokens, fill=-1, dtype=torch.int64) for name in slots}

    def build(self, batch: Batch) -> Step:
        """Check a batch and turn it into a step.

        Raises:
            CacheError: A length exceeds a limit, a block table does not fit, does not reach as far as the
                lengths, or has no page where this step writes.
        """
        check_batch(batch, self.limits, self._kinds)
        tables = {"window": batch.window, "context": batch.context, **batch.state}
        self._check_tables(tables, batch.total)
        query, total = (
            torch.tensor(batch.query, dtype=torch.int64),
            torch.tensor(batch.total, dtype=torch.int64),
        )
        starts = torch.nn.functional.pad(query.cumsum(0), (1, 0))
        requests = torch.repeat_interleave(torch.arange(len(batch.query)), query)
        positions = torch.arange(int(starts[-1])) - (starts[1:] - total)[requests]
        window = slot_mapping(batch.window, requests, positions, self.sizes.window)
        _refuse_lost_keys(window < 0, requests, positions, "window")
        device_tables = {group: _filled(buffer, tables[group], -1) for group, buffer in self._tables.items()}
        compressed, state = {}, {}
        for kind in self._kinds.values():
            entries = self._entry_slots(kind, batch, requests, positions)
            compressed[kind.name] = CacheTable(
                device_tables["context"],
                _filled(self._slots[f"compressed {kind.name}"], entries, -1),
                self.sizes.compressed_rows(kind),
            )
            states = self._state_slots(kind, batch, requests, positions, total)
            state[kind.name] = CacheTable(
                device_tables[kind.name],
                _filled(self._slots[f"state {kind.name}"], states, -1),
                self.sizes.state_rows(kind),
            )
        return Step(
            positions=_filled(self._positions, positions, 0),
            token_to_request=_filled(self._token_to_request, requests, 0),
            query_start_loc=_filled(self._query_start_loc, starts, int(starts[-1])),
            seq_lens=_filled(self._seq_lens, total, 0),
            num_decode_requests=batch.num_decode_requests,
            num_decode_tokens=int(starts[batch.num_decode_requests]),
            window=CacheTable(
                device_tables["window"], _filled(self._slots["window"], window, -1), self.sizes.window
            ),
            compressed=compressed,
            state=state,
            limits=self.limits,
            host_lengths=HostLengths(batch.query, batch.total),
        )

    def _check_tables(self, tables: dict[str, torch.Tensor], total: tuple[int, ...]) -> None:
        for group, page in self._page_tokens.items():
            table = tables[group]
            label = f"{group if group in ('window', 'context') else f'state {group}'} block table"
            if table.dtype != torch.int32 or table.dim() != 2:
                raise CacheError(
                    f"{label}: it is {list(table.shape)} of {str(table.dtype).removeprefix('torch.')}, and "
                    "block tables are [requests, pages] of int32; pass it so."
                )
            check_block_table(table, total, page, self._num_pages[group], label)

    def _entry_slots(
        self, kind: LayerKind, batch: Batch, requests: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        assert kind.ratio is not None
        rows = self.sizes.compressed_rows(kind)
        slots = entry_slot_mapping(batch.context, requests, positions, kind, rows)
        _refuse_lost_keys(((positions + 1) % kind.ratio == 0) & (slots < 0), requests, positions, "context")
        return slots

    def _state_slots(
        self,
        kind: LayerKind,
        batch: Batch,
        requests: torch.Tensor,
        positions: torch.Tensor,
        total: torch.Tensor,
    ) -> torch.Tensor:
        rows, table = self.sizes.state_rows(kind), batch.state[kind.name]
        kept = kind.state_window + self._slack
        slots = state_slot_mapping(table, requests, positions, total, kept, rows)
        recent = positions >= total[requests] - kept
        _refuse_lost_keys(recent & (slots < 0), requests, positions, f"state {kind.name}")
        return slots


def _refuse_lost_keys(
    lost: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor, group: str
) -> None:
    if lost.any():
        token = int(lost.nonzero()[0])
        raise CacheError(
            f"{group} block table: request {int(requests[token])} has no page for position "
            f"{int(positions[token])}, which this step writes; give it one."
        )


def _filled(buffer: torch.Tensor, values: torch.Tensor, rest: int) -> torch.Tensor:
    """`values` in the front corner of `buffer`, `rest` elsewhere; the buffer's rows of `values`."""
    rows = values.shape[0]
    view = buffer[:rows]
    if values.dim() == 1:
        view.copy_(values)
    else:
        columns = min(values.shape[1], buffer.shape[1])
        view[:, :columns] = values[:, :columns]
        view[:, columns:] = rest
    buffer[rows:] = rest
    return view
