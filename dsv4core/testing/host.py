"""A host at the kernel seam: it owns weights, caches and steps, and lends its tensors to the backend.

Its pages lie in no order, page 0 and the last one belong to nobody, pages that fell out of every window are
taken back, and every byte that no query may read is poison.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dsv4core.api import (
    AttentionOutput,
    CacheTable,
    LayerCaches,
    LayerWeights,
    Step,
    Weight,
)
from dsv4core.framework.binding import BoundKind, BoundLayer, bind_kind, bind_layer
from dsv4core.kvcache import KVCache
from dsv4core.model.rope import rope_table, rotate_back
from dsv4core.model.shapes import layer_spec
from dsv4core.step import Batch, StepBuffers, leading_decodes
from dsv4core.testing import oracle
from dsv4core.testing.case import Case
from dsv4core.testing.subject import Subject

INT_MAX = 2**31 - 1


class Host:
    """One layer kind, its caches, and the steps of some requests."""

    def __init__(self, subject: Subject, case: Case, seed: int = 0) -> None:
        """Ask the backend, make caches, and build the backend's state.

        Raises:
            Refused: The backend cannot run the case.
        """
        case = case.settled(subject)
        self.subject, self.case, self.device = subject, case, subject.device
        self.random = torch.Generator().manual_seed(seed)
        self.request = case.request(subject, "kernel")
        self.selection = subject.select(self.request)
        self.plan = self.selection.plans[case.kind.name]
        self.spec = layer_spec(case.model, 0, case.rank, case.ranks)
        self.rope = rope_table(
            case.model.rope_of(case.kind), case.model.qk_rope_head_dim, case.limits.max_model_len, self.device
        )
        self.requests = [_Request(self, number) for number in range(case.limits.max_requests)]
        self.caches = self._caches()
        self.sinks = self.normal(self.spec.num_heads) * 2
        self.layer = self.bind(self.sinks)
        self.kind = self.bind_kind()
        self._buffers, self._wide_tables = self._step_buffers(), dict[str, torch.Tensor]()

    def normal(self, *size: int) -> torch.Tensor:
        """Normal values, fp32 on the device, the same on every machine."""
        return torch.randn(*size, generator=self.random).to(self.device)

    def bind(self, sinks: torch.Tensor, weights: dict[str, Weight] | None = None) -> BoundLayer:
        """Build another layer of the kind, with sinks and perhaps weights of its own."""
        tensors = {"attn_sink": Weight(sinks), **(weights or {})}
        own = LayerWeights(tensors, self.rope, self.case.scales)
        return bind_layer(self.selection, self.spec, own, self.device)

    def bind_kind(self) -> BoundKind:
        """Build another shared state of the kind, as for a second group of block tables."""
        return bind_kind(self.selection, self.case.kind, self.device)

    def step(self, computed: tuple[int, ...], query: tuple[int, ...], kind: BoundKind | None = None) -> Step:
        """Begin a step: pages and keys for the requests, then the backend's plan.

        Args:
            computed: Tokens of each request that are cached already.
            query: Query tokens of each request.
            kind: The shared state that plans it; the host's own if None.
        """
        step = self.build(computed, query)
        self.plan_step(step, kind)
        return step

    def build(self, computed: tuple[int, ...], query: tuple[int, ...]) -> Step:
        """The step alone: what a host does before the backend plans."""
        for request, known, new in zip(self.requests, computed, query, strict=False):
            request.fill(known, new)
        count = len(query)
        window = torch.stack([request.window for request in self.requests])[:count]
        context = torch.stack([request.context for request in self.requests])[:count]
        decodes = leading_decodes(computed, query, self.case.decode_query_len)
        state = {name: self._state_table(count) for name in self._state_names}
        batch = Batch(computed, query, decodes, window, context, state)
        step = self._buffers.build(batch)
        lengths = step.host_lengths if self.request.host_lengths else None
        compressed = {name: self._in_wide_table(table, name) for name, table in step.compressed.items()}
        return replace(
            step,
            window=self._in_wide_table(step.window, "window"),
            compressed=compressed,
            state={},
            host_lengths=lengths,
        )

    def _in_wide_table(self, table: CacheTable, name: str) -> CacheTable:
        """A block table as a slice of a wider buffer, which keeps its address, as engines have it."""
        requests, pages = table.block_table.shape
        if name not in self._wide_tables:
            size = (self.case.limits.max_requests, pages + 3)
            self._wide_tables[name] = torch.full(size, INT_MAX, dtype=torch.int32, device=self.device)
        wide = self._wide_tables[name]
        wide[:requests, :pages] = table.block_table
        wide[requests:] = -1
        return replace(table, block_table=wide[:requests, :pages])

    def plan_step(self, step: Step, kind: BoundKind | None = None) -> None:
        """Let the backend prepare and plan."""
        kind = kind or self.kind
        kind.prepare_step(step)
        kind.plan_step(step)

    def query(self, step: Step, factor: float = 1.0) -> torch.Tensor:
        """Random queries as the plan wants them: `[tokens, padded heads, head_dim]`, padded ones zero."""
        q = self.normal(step.num_tokens, self.spec.num_heads, self.spec.model.head_dim) * factor
        if self.plan.q_dtype.startswith("float8"):
            q = q.clamp(-224, 224)  # what both flavours hold
        padding = self.plan.padded_q_heads - self.spec.num_heads
        return torch.nn.functional.pad(q, (0, 0, 0, padding)).to(getattr(torch, self.plan.q_dtype))

    def select(self, step: Step) -> torch.Tensor | None:
        """Random entries for each query that sees any, in no order; only these get keys."""
        kind, k = self.case.kind, self.case.index_topk
        if kind.select != "top_k":
            return None
        table = torch.full((step.num_tokens, k), -1, dtype=torch.int32)
        requests, positions = step.token_to_request.tolist(), step.positions.tolist()
        for token, (request, position) in enumerate(zip(requests, positions, strict=True)):
            visible = kind.visible_entries(position + 1)
            chosen = torch.randperm(visible, generator=self.random)[:k]
            self.requests[request].write_entries(chosen)
            table[token, : chosen.numel()] = chosen.int()
        return table.to(self.device)

    def attend(
        self,
        step: Step,
        q: torch.Tensor,
        selected: torch.Tensor | None,
        *,
        layer: BoundLayer | None = None,
        kind: BoundKind | None = None,
        out: torch.Tensor | None = None,
        want_lse: bool = False,
        apply_sink: bool = True,
    ) -> AttentionOutput:
        """The backend's attention."""
        layer, kind = layer or self.layer, kind or self.kind
        arguments = (q, self.caches, selected, step.positions, step, kind.state, out, want_lse, apply_sink)
        output = layer.forward_mqa(*arguments)
        assert isinstance(output, AttentionOutput), (
            f"dsv4_forward_mqa returned a {type(output).__name__}, and an AttentionOutput is due."
        )
        return output

    def heads(self, output: AttentionOutput) -> torch.Tensor:
        """A dense output without its padded heads."""
        data: torch.Tensor = output.data[:, : self.spec.num_heads]
        return data

    def expected(
        self,
        step: Step,
        q: torch.Tensor,
        selected: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The definition's output and log-sum-exp for the same bytes, fp64 on the CPU."""
        model = self.spec.model
        scale = self.case.scales.q if self.plan.q_dtype.startswith("float8") else 1.0
        out, lse = oracle.attend(
            q[:, : self.spec.num_heads].float() * scale,
            self.caches.window,
            self.caches.compressed,
            selected,
            step,
            self.case.kind,
            model.sliding_window,
            model.softmax_scale,
            sinks,
        )
        if self.plan.output.inverse_rotated:
            out = rotate_back(out.float(), step.positions.cpu(), self.rope.cpu()).double()
        return out, lse

    def _caches(self) -> LayerCaches:
        layout, sizes, kind = self.selection.layout, self.case.page_sizes, self.case.kind
        first, last = self.case.spare_pages, 1
        requests = self.case.limits.max_requests
        pages = first + requests * self._window_pages() + last
        window = self.case.pool(layout.window, pages, sizes.window, self.device)
        self._free_window = self._shuffled(first, pages - last)
        if kind.ratio is None:
            return LayerCaches(window)
        held = -(-self.case.limits.max_model_len // sizes.context)
        pages = first + requests * held + last
        self._free_context = self._shuffled(first, pages - last)
        rows = sizes.compressed_rows(kind)
        return LayerCaches(window, self.case.pool(layout.compressed, pages, rows, self.device))

    def _window_pages(self) -> int:
        """Most pages that a request holds: its window, a whole chunk, and the ends of both."""
        tokens = self.case.model.sliding_window + self.case.limits.max_query_len
        return -(-tokens // self.case.page_sizes.window) + 1

    def _shuffled(self, first: int, end: int) -> list[int]:
        return [first + int(page) for page in torch.randperm(end - first, generator=self.random)]

    def _step_buffers(self) -> StepBuffers:
        pages = {"window": self.caches.window.num_pages}
        compressed = self.caches.compressed
        pages["context"] = 1 if compressed is None else compressed.num_pages
        kinds = [] if compressed is None else [self.case.kind]
        self._state_names = tuple(kind.name for kind in kinds)
        rows = self.case.page_sizes.state_rows(self.case.kind)
        self._state_pages = -(-self.case.limits.max_model_len // rows)
        pages |= dict.fromkeys(self._state_names, self._state_pages)
        return StepBuffers(
            kinds, self.case.limits, self.case.page_sizes, pages, self.device, self.case.decode_query_len
        )

    def _state_table(self, requests: int) -> torch.Tensor:
        """States are the host's own affair at this seam; steps are made with a table of them."""
        return torch.arange(self._state_pages, dtype=torch.int32).expand(requests, -1)


class _Request:
    """One request's pages, and which of its rows hold keys."""

    def __init__(self, host: Host, number: int) -> None:
        self.host, self.number = host, number
        length, sizes = host.case.limits.max_model_len, host.case.page_sizes
        self.window = torch.full((-(-length // sizes.window),), -1, dtype=torch.int32)
        self.context = torch.full((-(-length // sizes.context),), -1, dtype=torch.int32)
        self._known_tokens = torch.zeros(length, dtype=torch.bool)
        ratio = host.case.kind.ratio
        self._known_entries = torch.zeros(0 if ratio is None else length // ratio, dtype=torch.bool)
        self._length = 0

    def fill(self, computed: int, query: int) -> None:
        """Have the pages and keys that queries from `computed` on look back on, and no others.

        A request that goes back by more than its drafts is another one, with pages of its own.
        """
        host, total = self.host, computed + query
        if computed < self._length - host.case.decode_query_len:
            self._begin_again()
        self._length = total
        first = max(0, computed - host.spec.model.sliding_window + 1)
        self._give_back_window(first // host.case.page_sizes.window)
        self._take(self.window, first // host.case.page_sizes.window, total, host.case.page_sizes.window)
        self._write(host.caches.window, self.window, self._known_tokens, torch.arange(first, total))
        kind = host.case.kind
        if kind.ratio is not None:
            self._take(self.context, 0, total, host.case.page_sizes.context)
            if kind.select == "all":
                self.write_entries(torch.arange(total // kind.ratio))

    def write_entries(self, numbers: torch.Tensor) -> None:
        """Have keys for these entries."""
        cache = self.host.caches.compressed
        assert cache is not None
        self._write(cache, self.context, self._known_entries, numbers)

    def _begin_again(self) -> None:
        self._give_back_window(len(self.window))
        compressed = self.host.caches.compressed
        if compressed is not None:
            self._give_back(self.context, compressed, self.host._free_context)
        self._known_tokens.fill_(False)
        self._known_entries.fill_(False)

    def _give_back_window(self, pages: int) -> None:
        """The first pages: no query looks at them any more."""
        self._give_back(self.window[:pages], self.host.caches.window, self.host._free_window)

    def _give_back(self, table: torch.Tensor, cache: KVCache, free: list[int]) -> None:
        held = table[table >= 0].tolist()
        free.extend(held)
        table.fill_(-1)
        if self.host.case.poison is not None:
            for region in cache.regions:
                region[held] = self.host.case.poison

    def _take(self, table: torch.Tensor, first_page: int, total: int, page_tokens: int) -> None:
        free = self.host._free_window if table is self.window else self.host._free_context
        for page in range(first_page, -(-total // page_tokens)):
            if table[page] < 0:
                table[page] = free.pop()

    def _write(self, cache: KVCache, table: torch.Tensor, known: torch.Tensor, numbers: torch.Tensor) -> None:
        new = numbers[~known[numbers]]
        known[new] = True
        slots = table.long()[new // cache.page_size] * cache.page_size + new % cache.page_size
        rows = self.host.normal(new.numel(), self.host.spec.model.head_dim)
        cache.write(slots.to(self.host.device), rows)
