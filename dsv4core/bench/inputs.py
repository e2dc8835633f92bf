"""Inputs of a measurement: pools larger than the device's cache, and steps that read other pages of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from dsv4core.api import (
    CacheTable,
    HostLengths,
    KVCacheFormat,
    LayerCaches,
    LayerSpec,
    LayerWeights,
    Step,
    Weight,
)
from dsv4core.bench.cost import costs
from dsv4core.bench.timing import cache_bytes
from dsv4core.bench.workload import Workload
from dsv4core.framework.binding import BoundKind, BoundLayer, bind_kind, bind_layer
from dsv4core.framework.selection import Selection
from dsv4core.kvcache import KVCache, allocate_cache
from dsv4core.model.blocks import quantize_block
from dsv4core.model.rope import rope_table
from dsv4core.model.shapes import layer_spec
from dsv4core.model.tensors import QUANTISED, layer_tensors

MOST_TURNS = {"cuda": 2048, "cpu": 8}
"""By device: a graph holds a round of turns, and a CPU computes much longer than it reads."""
ROWS = 4096
"""Different rows that fill a pool."""
LAYERS, SPARE_BYTES = 64, 1 << 17
"""Pools of so many layers begin so many bytes apart; as many pages at their end are in no table."""


@dataclass(frozen=True, eq=False)
class Turn:
    """What one call gets; the next one gets other tables, queries and choices.

    Attributes:
        step: The step, planned by `kind`.
        kind: The backend's shared state.
        q: `[tokens, padded heads, head_dim]`.
        selected: `[tokens, index_topk]` int32, or None.
        hidden: `[tokens, hidden_size]`.
    """

    step: Step
    kind: BoundKind
    q: torch.Tensor
    selected: torch.Tensor | None
    hidden: torch.Tensor


class Inputs:
    """One layer kind on one backend."""

    def __init__(self, selection: Selection, workload: Workload, device: torch.device) -> None:
        """Make pools and steps.

        Args:
            selection: A selection for the workload's limits.
            workload: What is measured.
            device: Where.
        """
        self.selection, self.workload, self.device = selection, workload, device
        request = selection.request
        self.dtype = getattr(torch, request.dtype)
        index = request.model.layer_kinds.index(workload.kind)
        self.spec = layer_spec(request.model, index, tp_size=request.tensor_parallel)
        self.plan = selection.plans[workload.kind.name]
        self.sizes = request.page_sizes
        self.random = torch.Generator(device).manual_seed(0)
        self._cache = cache_bytes(device)
        self._costs = costs(self.spec, selection.layout, workload, request.dtype)
        self._turns: list[Turn] = []
        self._weights: list[LayerWeights] = []
        self.caches = self._caches()
        self.rope = rope_table(
            request.model.rope_of(workload.kind),
            request.model.qk_rope_head_dim,
            max(workload.total),
            device,
        )

    def turns(self, operation: str, calls: int = 1) -> list[Turn]:
        """So many turns that a round of the operation moves twice the bytes that the device's cache holds.

        There are fewer where that takes more than a graph should hold or memory allows, and at least 2.

        Args:
            operation: What is measured.
            calls: Of the operation in each turn; with several of them one turn may do.
        """
        most = MOST_TURNS.get(self.device.type, MOST_TURNS["cpu"])
        touched = max(self._costs[operation].bytes, 1)
        wanted = max(2, min(most, -(-2 * self._cache // touched)))
        wanted = -(-wanted // calls)
        while len(self._turns) < wanted and (len(self._turns) < 2 or self._has_room()):
            self._turns.append(self._turn())
        return self._turns[:wanted]

    def weights(self, count: int) -> list[LayerWeights]:
        """Random weights of so many layers; a backend and its peers get the same."""
        missing = count - len(self._weights)
        self._weights += [random_weights(self.spec, self.rope, self.device) for _ in range(missing)]
        return self._weights[:count]

    def layers(self, count: int) -> list[tuple[BoundLayer, LayerWeights]]:
        """So many layers of the backend, with their weights."""
        return [
            (bind_layer(self.selection, self.spec, weights, self.device), weights)
            for weights in self.weights(count)
        ]

    def shifted(self, layer: int) -> LayerCaches:
        """The same pools from some page on: at the same slots, rows of another layer.

        Of all pools about as many bytes are left out, so that they lie from each other as those of the first
        layer do, where their pages allow it.
        """

        caches = self.caches

        def later(cache: KVCache | None, like: KVCache | None) -> KVCache | None:
            """From the page on that the pool with the same table leaves out."""
            if cache is None or like is None:
                return None
            return replace(cache, pool=cache.pool[layer % LAYERS * SPARE_BYTES // like.page_stride_bytes :])

        window = later(caches.window, caches.window)
        assert window is not None
        return LayerCaches(
            window,
            later(caches.compressed, caches.compressed),
            later(caches.index, caches.compressed),
            later(caches.state, caches.state),
            later(caches.index_state, caches.state),
        )

    def _has_room(self) -> bool:
        """Whether a quarter of the device's memory is left."""
        if self.device.type != "cuda":
            return True
        total = torch.cuda.get_device_properties(self.device).total_memory
        return torch.cuda.memory_allocated(self.device) < total // 4 * 3

    def _caches(self) -> LayerCaches:
        layout, kind, model = self.selection.layout, self.workload.kind, self.spec.model
        caches = LayerCaches(self._pool(layout.window, self.sizes.window))
        if kind.ratio is None:
            return caches
        rows, state = self.sizes.compressed_rows(kind), self.sizes.state_rows(kind)
        caches = replace(
            caches,
            compressed=self._pool(layout.compressed, rows),
            state=self._pool(layout.state.resized(kind.groups * model.head_dim), state),
        )
        assert caches.compressed is not None
        assert caches.state is not None
        if kind.select != "top_k":
            return caches
        width = kind.groups * model.index_head_dim
        return replace(
            caches,
            # The tables are those of the compressed caches and of their states.
            index=self._pool(layout.index, rows, caches.compressed.num_pages),
            index_state=self._pool(layout.state.resized(width), state, caches.state.num_pages),
        )

    def _pool(self, format: KVCacheFormat, rows: int, pages: int = 0) -> KVCache:
        """A pool much larger than the device's cache, full of the same few thousand rows.

        Steps take pages of it at random. It holds a step's rows once, as far as that is not more than 4 GiB.
        """
        step = len(self.workload.query) * max(self.workload.total) * format.bytes_per_token
        wanted = max(8 * self._cache, min(step // (self.workload.kind.ratio or 1), 1 << 32))
        pages = pages or max(wanted // format.page_bytes(rows), 64) + _spare(format.page_bytes(rows))
        cache = allocate_cache(format, pages, rows, self.device)
        width = sum(part.width for part in format.parts if part.name != "scale")
        first = min(pages, -(-ROWS // rows))
        slots = torch.arange(first * rows, device=self.device)
        cache.write(slots, torch.randn(slots.numel(), width, generator=self.random, device=self.device))
        for region in cache.regions:
            for page in range(first, pages, first):
                count = min(first, pages - page)
                region[page : page + count] = region[:count]
        return cache

    def _turn(self) -> Turn:
        step, workload, spec = self._step(), self.workload, self.spec
        kind = bind_kind(self.selection, workload.kind, self.device)
        kind.prepare_step(step)
        kind.plan_step(step)
        q = self._normal(workload.tokens, spec.num_heads, spec.model.head_dim)
        padding = self.plan.padded_q_heads - spec.num_heads
        q = torch.nn.functional.pad(q, (0, 0, 0, padding)).to(getattr(torch, self.plan.q_dtype))
        hidden = self._normal(workload.tokens, spec.model.hidden_size).to(self.dtype)
        return Turn(step, kind, q, self._selected(step), hidden)

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random, device=self.device)

    def _pages(self, count: int, *size: int) -> torch.Tensor:
        """Random pages of `count`, all different where there are enough: a step must not overwrite itself."""
        wanted = math.prod(size)
        if wanted <= count:
            pages = torch.randperm(count, generator=self.random, device=self.device)[:wanted]
        else:
            pages = torch.randint(count, (wanted,), generator=self.random, device=self.device)
        return pages.int().view(size)

    def _selected(self, step: Step) -> torch.Tensor | None:
        kind, k = self.workload.kind, self.spec.model.index_topk
        if kind.select != "top_k" or kind.ratio is None:
            return None
        visible = ((step.positions + 1) // kind.ratio)[:, None]
        lane = torch.arange(k, device=self.device, dtype=torch.int32)
        # Distinct up to chance; all of them where there are no more than k.
        drawn = (torch.rand(step.num_tokens, k, generator=self.random, device=self.device) * visible).int()
        return torch.where(visible > k, drawn, torch.where(lane < visible, lane, -1)).int()

    def _step(self) -> Step:
        workload, kind = self.workload, self.workload.kind
        query = torch.tensor(workload.query, device=self.device)
        total = torch.tensor(workload.total, device=self.device)
        starts = torch.nn.functional.pad(query.cumsum(0), (1, 0))
        requests = torch.repeat_interleave(torch.arange(len(workload.query), device=self.device), query)
        tokens = torch.arange(workload.tokens, device=self.device)
        positions = tokens - (starts[1:] - total)[requests]
        window = self._table(self.caches.window, self.sizes.window, self.sizes.window, requests, positions)
        compressed, state = {}, {}
        if kind.ratio is not None and self.caches.compressed is not None and self.caches.state is not None:
            rows, ratio = self.sizes.compressed_rows(kind), kind.ratio
            entries = torch.where((positions + 1) % ratio == 0, positions // ratio, -1)
            compressed[kind.name] = self._table(
                self.caches.compressed, rows, self.sizes.context, requests, entries
            )
            rows = self.sizes.state_rows(kind)
            kept = torch.where(positions >= total[requests] - kind.state_window, positions, -1)
            state[kind.name] = self._table(self.caches.state, rows, rows, requests, kept)
        return Step(
            positions=positions,
            token_to_request=requests.int(),
            query_start_loc=starts.int(),
            seq_lens=total.int(),
            num_decode_requests=workload.decodes,
            num_decode_tokens=workload.decodes,
            window=window,
            compressed=compressed,
            state=state,
            limits=self.selection.request.limits,
            host_lengths=HostLengths(workload.query, workload.total),
        )

    def _table(
        self,
        cache: KVCache,
        rows: int,
        page_tokens: int,
        requests: torch.Tensor,
        numbers: torch.Tensor,
    ) -> CacheTable:
        """Random pages for everything, and the slots of the rows with these numbers, -1 for none."""
        columns = -(-max(self.workload.total) // page_tokens)
        table = self._pages(
            cache.num_pages - _spare(cache.page_stride_bytes), len(self.workload.query), columns
        )
        known = numbers.clamp_min(0)
        slots = table[requests, known // rows].long() * rows + known % rows
        return CacheTable(table, torch.where(numbers < 0, -1, slots), rows)


def _spare(page_bytes: int) -> int:
    return LAYERS * SPARE_BYTES // page_bytes + 1


def random_weights(spec: LayerSpec, rope: torch.Tensor, device: torch.device) -> LayerWeights:
    """One rank's weights, random, FP8 where a checkpoint has FP8, made on the device; sinks are 0."""
    ranks = spec.model.num_attention_heads // spec.num_heads
    tensors = {}
    for name, tensor in layer_tensors(spec.model, spec.kind).items():
        size = list(tensor.shape)
        if tensor.split is not None:
            size[tensor.split] //= ranks
        values = torch.randn(size, device=device)
        if tensor.dtypes == QUANTISED:
            tensors[name] = Weight(*quantize_block(values / size[1] ** 0.5), (128, 128))
        elif name == "attn_sink":
            tensors[name] = Weight(torch.zeros_like(values))
        elif name.endswith("ape"):
            tensors[name] = Weight(values)
        elif name.endswith("norm"):
            tensors[name] = Weight((1 + 0.1 * values).bfloat16())
        else:
            tensors[name] = Weight((values / size[-1] ** 0.5).bfloat16())
    return LayerWeights(tensors, rope)
