"""The compressor's golden vectors, and its independence of chunks."""

import pytest
import torch

from dsv4core.api import C4A, C128A, Limits, PageSizes
from dsv4core.kvcache import cache_layout
from dsv4core.kvcache.pools import CachePools
from dsv4core.model.rope import rope_table
from dsv4core.model.shapes import PRESETS, layer_spec
from dsv4core.ops import compress, rms_norm
from dsv4core.ops.compress import reference
from dsv4core.step import Batch, StepBuffers

MODEL = PRESETS["v4_flash"]
LAYER = {C4A: layer_spec(MODEL, 2), C128A: layer_spec(MODEL, 3)}
EPS = 1e-6

# Entry completed at token t: c and n at channels 0, 447, 448, 511; y at 448, 449, 510, 511.
GOLDEN = {
    (C4A, 3): (
        [-0.018864, 0.098066, 0.102312, -0.121587],
        [-0.048679, 0.366177, 0.382298, -0.474084],
        [0.382298, 0.397636, -0.445488, -0.474084],
    ),
    (C4A, 7): (
        [-0.049375, -0.092711, -0.087481, 0.027300],
        [-0.201008, -0.546143, -0.515692, 0.167934],
        [-0.030444, 0.707704, 0.193242, 0.167935],
    ),
    (C4A, 11): (
        [0.070120, -0.103445, -0.106160, -0.297549],
        [0.288361, -0.615562, -0.632149, -1.848903],
        [0.729779, -0.531623, -1.777191, -1.848912],
    ),
    (C128A, 127): (
        [0.912489, 0.052847, -0.029996, 0.033589],
        [7.671089, 0.642859, -0.365138, 0.426663],
        [-0.365138, -0.856761, 1.297292, 0.426663],
    ),
    (C128A, 255): (
        [0.611176, -0.047003, 0.015993, -0.087499],
        [4.447479, -0.494929, 0.168520, -0.962087],
        [-0.272051, -0.027715, 0.787629, -0.962029],
    ),
}


class Host:
    """One request, or several, with caches in fp32 so that entries can be read back unrounded."""

    def __init__(self, kind, requests=1, length=512, kv_format="fp32"):
        self.limits = Limits(requests * length, requests, length, length)
        layout = cache_layout(MODEL, kv_format, "fp32")
        self.pools = CachePools([LAYER[kind]], layout, PageSizes(), self.limits)
        self.caches = self.pools.layers[LAYER[kind].index]
        tables = self.pools.tables
        pages = {"window": tables.window.num_pages, "context": tables.context.num_pages}
        pages |= {name: table.num_pages for name, table in tables.state.items()}
        self.buffers = StepBuffers([kind], self.limits, PageSizes(), pages)
        for request in range(requests):
            tables.grow(request, length)

    def step(self, computed, query):
        tables = self.pools.tables
        state = {name: table.block_table for name, table in tables.state.items()}
        return self.buffers.build(
            Batch(
                tuple(computed), tuple(query), 0, tables.window.block_table, tables.context.block_table, state
            )
        )


def golden_inputs(kind, tokens):
    width = kind.groups * 512
    t, j = torch.arange(tokens, dtype=torch.float64)[:, None], torch.arange(width, dtype=torch.float64)
    projected = torch.cat([torch.sin(0.01 * (t + 1) * (j + 1)), torch.cos(0.02 * (t + 1) + 0.003 * j)], 1)
    ape = 0.1 * torch.arange(kind.ratio)[:, None] - 0.0005 * j
    return projected.float(), ape.float(), 1 + 0.001 * torch.arange(512)


@pytest.mark.parametrize(("kind", "token"), GOLDEN)
@pytest.mark.parametrize("chunk", [512, 5])
def test_golden_entries(kind, token, chunk):
    projected, ape, norm = golden_inputs(kind, token + 1)
    table = rope_table(MODEL.compress_rope, 64, 1024)
    host = Host(kind)
    for start in range(0, token + 1, chunk):
        part = projected[start : start + chunk]
        step = host.step([start], [len(part)])
        compress(part, ape, norm, table, EPS, kind, step, host.caches.state, host.caches.compressed)
    slot = step.compressed[kind.name].slot_mapping[-1:]
    y = host.caches.compressed.read(slot)[0]
    _, n, rotated = (torch.tensor(values) for values in GOLDEN[kind, token])
    torch.testing.assert_close(y[[448, 449, 510, 511]], rotated, atol=2e-6, rtol=0)
    torch.testing.assert_close(y[[0, 447]], n[:2], atol=2e-6, rtol=0)


@pytest.mark.parametrize(("kind", "token"), GOLDEN)
def test_golden_pooled_rows_before_and_after_their_norm(kind, token):
    projected, ape, norm = golden_inputs(kind, token + 1)
    values, scores = projected.chunk(2, dim=1)
    host = Host(kind)
    scores = scores + ape[torch.arange(token + 1) % kind.ratio]
    step = host.step([0], [token + 1])
    pooled = reference._pool(values, scores, torch.tensor([token]), kind, step, host.caches.state)[0]
    c, n, _ = (torch.tensor(values) for values in GOLDEN[kind, token])
    places = [0, 447, 448, 511]
    torch.testing.assert_close(pooled[places], c, atol=1.5e-6, rtol=0)
    torch.testing.assert_close(rms_norm(pooled, norm, EPS)[places], n, atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", [C4A, C128A])
@pytest.mark.parametrize("kv_format", ["fp32", "fp8_ds_mla"])
def test_any_chunking_gives_the_same_bytes(kind, kv_format):
    generator = torch.Generator().manual_seed(1)
    lengths = (400, 131)
    projected = [torch.randn(n, 2 * kind.groups * 512, generator=generator) for n in lengths]
    ape, norm = torch.randn(kind.ratio, kind.groups * 512, generator=generator), torch.rand(512) + 0.5
    table = rope_table(MODEL.compress_rope, 64, 1024)

    def run(chunks):
        host = Host(kind, requests=2, kv_format=kv_format)
        done = [0, 0]
        for query in chunks:
            step = host.step(done, query)
            part = torch.cat([p[d : d + q] for p, d, q in zip(projected, done, query, strict=True)])
            compress(part, ape, norm, table, EPS, kind, step, host.caches.state, host.caches.compressed)
            done = [d + q for d, q in zip(done, query, strict=True)]
        assert tuple(done) == lengths
        entries = [kind.visible_entries(n) for n in lengths]
        context, rows = host.pools.tables.context.block_table, host.caches.compressed.page_size
        slots = [
            context[r, torch.arange(n) // rows].long() * rows + torch.arange(n) % rows
            for r, n in enumerate(entries)
        ]
        return [view[s // rows, s % rows] for s in slots for view in host.caches.compressed.regions]

    whole = run([lengths])
    for chunks in (
        [(399, 130), (1, 1)],
        [(7, 0), (0, 3), (121, 124), (272, 1), (0, 3)],
        [(1, 1)] * 131 + [(1, 0)] * 269,
    ):
        for expected, found in zip(whole, run(chunks), strict=True):
            assert torch.equal(expected, found)


@pytest.mark.parametrize("kind", [C4A, C128A])
def test_padding_tokens_write_nothing_and_stale_rows_do_not_matter(kind):
    host = Host(kind)
    for cache in (host.caches.state, host.caches.compressed):
        cache.pool.fill_(float("nan"))
    projected, ape, norm = golden_inputs(kind, 2 * kind.ratio + 1)
    table = rope_table(MODEL.compress_rope, 64, 1024)
    step = host.step([0], [len(projected)])
    state, entries = step.state[kind.name], step.compressed[kind.name]
    entries.slot_mapping[-2:] = -1  # the second entry belongs to a padding row
    state.slot_mapping[-1:] = -1
    compress(projected, ape, norm, table, EPS, kind, step, host.caches.state, host.caches.compressed)
    assert int(host.caches.compressed.pool.isfinite().all(-1).sum()) == 1
    assert int(host.caches.state.pool.isfinite().all(-1).sum()) == kind.state_window


def test_states_are_values_then_scores_with_ape():
    host = Host(C4A)
    projected, ape, norm = golden_inputs(C4A, 6)
    table = rope_table(MODEL.compress_rope, 64, 1024)
    step = host.step([0], [6])
    compress(projected, ape, norm, table, EPS, C4A, step, host.caches.state, host.caches.compressed)
    rows = host.caches.state.read(step.state["c4a"].slot_mapping)
    values, scores = projected.chunk(2, dim=1)
    assert torch.equal(rows, torch.cat([values, scores + ape[torch.arange(6) % 4]], dim=1))


def test_rms_norm_rounds_once():
    x = torch.randn(3, 64).bfloat16()
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * 1.5
    assert torch.equal(rms_norm(x, torch.full((64,), 1.5), EPS), expected.bfloat16())
