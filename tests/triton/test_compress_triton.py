"""Entries and states as the definition leaves them, whatever the chunks."""

from __future__ import annotations

import pytest
import torch

from dsv4core.api import C4A, C128A, LayerKind, Limits, PageSizes
from dsv4core.kvcache import cache_layout
from dsv4core.kvcache.pools import CachePools
from dsv4core.model.rope import rope_table
from dsv4core.model.shapes import PRESETS, layer_spec
from dsv4core.ops import compress as defined
from dsv4core.ops.compress import triton as kernels
from dsv4core.step import Batch, StepBuffers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODEL = PRESETS["v4_flash"]
LAYERS = {C4A: layer_spec(MODEL, 2), C128A: layer_spec(MODEL, 3)}
LIMITS = Limits(max_tokens=140, max_requests=2, max_model_len=264, max_query_len=140)
SIZES = PageSizes(state=3)


class Host:
    """Two requests of a layer."""

    def __init__(self, kind: LayerKind, run: object) -> None:
        layout = cache_layout(MODEL, "fp32", "fp8")
        self.kind, self.run = kind, run
        self.pools = CachePools([LAYERS[kind]], layout, SIZES, LIMITS, DEVICE)
        self.caches = self.pools.layers[LAYERS[kind].index]
        self.buffers = StepBuffers([kind], LIMITS, SIZES, self.pools.tables.num_pages(), DEVICE)

    def step(self, computed, query, main, index, weights):
        tables = self.pools.tables
        for request, (known, new) in enumerate(zip(computed, query, strict=True)):
            tables.grow(request, known + new)
        state = {name: own.block_table for name, own in tables.state.items()}
        decodes = len(query) if max(query) < 5 and 0 not in computed else 0
        batch = Batch(computed, query, decodes, tables.window.block_table, tables.context.block_table, state)
        step = self.buffers.build(batch)
        pairs = [(main, self.caches.state, self.caches.compressed)]
        if self.caches.index is not None:
            pairs.append((index, self.caches.index_state, self.caches.index))
        for rows, states, entries in pairs:
            ape, norm, rope = weights[rows.shape[1]]
            self.run(rows, ape, norm, rope, 1e-6, self.kind, step, states, entries)


@pytest.mark.parametrize("kind", [C4A, C128A], ids=["c4a", "c128a"])
@pytest.mark.parametrize("many", [0, 1024])
def test_chunks_of_two_requests(kind: LayerKind, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a program looks at one token or at several."""
    monkeypatch.setattr(kernels, "MANY", many)
    hosts = [Host(kind, run) for run in (defined, kernels.compress)]
    rope = rope_table(MODEL.rope_of(kind), 64, 300, DEVICE)
    weights = {}
    for width in (512, 128):
        ape = torch.randn(kind.ratio, kind.groups * width, device=DEVICE)
        norm = torch.rand(width, device=DEVICE).bfloat16()
        weights[2 * kind.groups * width] = (ape, norm, rope)
    computed = (0, 0)
    for query in ((126, 3), (1, 1), (1, 0), (5, 120), (1, 4)):
        # Slices of what one product gave; rows of one of them do not begin at multiples of 16 bytes.
        wide = {width: torch.randn(sum(query), width + width % 3 + 1, device=DEVICE) * 3 for width in weights}
        main, index = (rows[:, :width] for width, rows in wide.items())
        for host in hosts:
            host.step(computed, query, main, index, weights)
        computed = tuple(known + new for known, new in zip(computed, query, strict=True))
    for name, due in vars(hosts[0].caches).items():
        if due is not None and name != "window":
            slots = torch.arange(due.num_pages * due.page_size, device=DEVICE)
            found = getattr(hosts[1].caches, name).read(slots)
            off = (found - due.read(slots)).norm(dim=-1) / due.read(slots).norm(dim=-1).clamp_min(1e-9)
            assert float(off.max()) < (2e-2 if name == "index" else 1e-5), name


@pytest.mark.parametrize("chunks", [(3, *[1] * 9), (7, 1, 4)], ids=str)
def test_decodes_leave_the_entries_of_a_chunk(chunks: tuple[int, ...]) -> None:
    """Bit for bit, though they come from another kernel."""
    sizes = (2048, 512)
    main, index = (torch.randn(12, size, device=DEVICE) for size in sizes)
    rope = rope_table(MODEL.rope_of(C4A), 64, 300, DEVICE)
    weights = {
        size: (torch.randn(4, size // 2, device=DEVICE), torch.rand(size // 4, device=DEVICE), rope)
        for size in sizes
    }
    hosts = [Host(C4A, kernels.compress) for _ in range(2)]
    for host, counts in zip(hosts, ((12,), chunks), strict=True):
        done = 0
        for count in counts:
            rows = slice(done, done + count)
            both = (torch.cat([own[rows], own[rows]]) for own in (main, index))
            host.step((done, done), (count, count), *both, weights)
            done += count
    for name in ("compressed", "index"):
        one, other = (getattr(host.caches, name) for host in hosts)
        assert torch.equal(one.pool.view(torch.uint8), other.pool.view(torch.uint8)), name
        rows = one.read(torch.arange(one.num_pages * one.page_size, device=DEVICE))
        assert int(rows.any(-1).sum()) == 6, name
