"""The kernel against float32 torch on the same bytes, on sm_90; how keys are divided, anywhere."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4_plugin_hopper.plugin import HopperOptions

from dsv4core.api import ConfigError, DSV4Error
from dsv4core.kvcache import KVCache, allocate_cache, cache_layout
from dsv4core.model.shapes import PRESETS

with_bindings = pytest.mark.skipif(find_spec("cuda") is None, reason="cuda-bindings is not installed.")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="It needs an sm_90 GPU.")
SCALES = {"fp8_ds_mla": None, "bf16": None, "fp8_e4m3": (0.0375, 0.02)}
"""Of the pools of a format, where it has some."""
SCALE = 512**-0.5
CLUSTERS = {size: 132 if size == 1 else 8 * (16 // size) for size in range(1, 17)}
"""Of so many blocks, that a GPU of eight times sixteen processors, and four more, runs at once."""


def test_unknown_operands() -> None:
    with pytest.raises(ConfigError, match="backend.operands=fp8 is not known; write bf16 or f16"):
        HopperOptions(operands="fp8")


@with_bindings
@pytest.mark.parametrize(
    ("queries", "heads", "tiles", "item_heads", "slices", "blocks"),
    [
        (1, 64, 10, 8, 10, 8),
        (8, 64, 10, 64, 10, 8),
        (16, 64, 10, 64, 5, 16),
        (32, 64, 10, 64, 4, 32),
        (64, 64, 10, 64, 2, 64),
        (64, 16, 10, 64, 2, 64),
        (128, 64, 10, 64, 1, 128),
        (4000, 64, 10, 64, 1, 132),
        (1, 128, 18, 16, 9, 8),
        (8, 128, 18, 64, 6, 16),
        (100, 128, 18, 64, 1, 132),
        (1, 64, 100, 8, 15, 8),
        (1, 64, 1, 64, 1, 1),
        (1, 8, 0, 64, 1, 1),
    ],
)
def test_division(
    queries: int,
    heads: int,
    tiles: int,
    item_heads: int,
    slices: int,
    blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer heads an item where few are to be merged; clusters that run at once, or one block a processor."""
    from dsv4_plugin_hopper import attend, compiled

    monkeypatch.setattr(compiled, "clusters", lambda name, device, size, threads: CLUSTERS[size])
    own = attend.division.__wrapped__("packed_bf16", 0, queries, heads, tiles)
    assert own == attend.Division(item_heads, queries * -(-heads // item_heads), slices, blocks)


@with_bindings
@pytest.mark.parametrize("divisor", [1, 2, 61, 64, 256, 576, 4095])
def test_quotients(divisor: int) -> None:
    """Slots are divided by a page's size with a product and a shift."""
    from dsv4_plugin_hopper.attend import quotient

    factor, shift = quotient(divisor)
    assert factor < 1 << 32
    for own in (*range(3 * divisor), *range((1 << 31) - 3 * divisor, 1 << 31)):
        assert own * factor >> shift == own // divisor


def pool(
    format: str, scale: float, size: int, random: torch.Generator, device: torch.device
) -> tuple[KVCache, torch.Tensor]:
    """A pool of 4,000 rows in pages of `size`: half of them are NaN; and the slots of the others."""
    layout, pages = cache_layout(PRESETS["v4_flash"], format, "fp8").window, -(-4000 // size)
    factor = None if SCALES[format] is None else torch.tensor([scale], device=device)
    cache = allocate_cache(layout, pages, size, device, scale=factor)
    cache.pool.view(torch.uint8).fill_(0xFF)
    used = torch.randperm(pages * size, generator=random)[: pages * size // 2].to(device)
    cache.write(used, torch.randn(len(used), 512, generator=random).to(device))
    return cache, used


def check(
    columns: tuple[int, ...], heads: int, queries: int, format: str, f16: bool, device: torch.device
) -> None:
    """Holes, a first tile and a query of nothing, large scores, infinite sinks, lengths; twice the same."""
    from dsv4_plugin_hopper.attend import Pool, attend

    random = torch.Generator().manual_seed(heads + queries)
    further = queries % 2  # heads and columns that others have between ours
    q = torch.randn(queries, heads + further, 512, generator=random).bfloat16().to(device)[:, :heads]
    q[::3] *= 12
    sinks = torch.randn(heads, generator=random).to(device) * 3
    sinks[0] = -math.inf
    pools = []
    for size, width, scale in zip((61, 64), columns, SCALES[format] or (1.0, 1.0), strict=False):
        cache, used = pool(format, scale, size, random, device)
        some = torch.randint(len(used), (queries, width + further), generator=random).to(device)
        slots = used[some].int()[:, :width]
        slots[(torch.rand(queries, width, generator=random) < 0.3).to(device)] = -1
        slots[0, :70] = -1
        if queries > 2:
            slots[queries // 2] = -1
        lengths = torch.randint(width // 2, width + 1, (queries,), generator=random).int()
        lengths[1:4] = torch.tensor([-7, width + 1000, 0])[: queries - 1]
        pools.append(Pool(cache, slots, None if queries % 5 == 2 else lengths.to(device)))
    for own_sinks in (sinks, None):
        out, lse = attend(q, pools, SCALE, own_sinks, want_lse=True, f16=f16)
        again, _ = attend(q, pools, SCALE, own_sinks, f16=f16)
        assert torch.equal(out, again)
        for query in range(queries):
            named = [
                own.slots[
                    query, : own.slots.shape[1] if own.lengths is None else max(int(own.lengths[query]), 0)
                ]
                for own in pools
            ]
            rows = [own.cache.read(slots[slots >= 0]) for own, slots in zip(pools, named, strict=True)]
            keys = torch.cat(rows)
            scores = q[query].float() @ keys.T * SCALE
            due_lse = scores.logsumexp(-1)
            total = due_lse if own_sinks is None else torch.logaddexp(due_lse, own_sinks)
            due = (
                (scores - total[:, None]).exp() @ keys if len(keys) else torch.zeros_like(out[query].float())
            )
            assert lse is not None
            torch.testing.assert_close(lse[query], due_lse, rtol=2e-4, atol=2e-4)
            # Weights and results are rounded to bf16, each off by 2^-8 at most: 4.04e-3 was seen.
            assert float((out[query].float() - due).norm()) <= 4.5e-3 * float(due.norm())


@on_a_gpu
@pytest.mark.parametrize(
    ("format", "f16"),
    [("fp8_ds_mla", False), ("fp8_ds_mla", True), ("fp8_e4m3", False), ("bf16", False)],
)
@pytest.mark.parametrize("queries", [1, 5, 42, 200])
@pytest.mark.parametrize("heads", [1, 8, 17, 64, 96, 128])
@pytest.mark.parametrize("columns", [(128,), (128, 512), (70, 1), (200, 8320)])
def test_attend(columns: tuple[int, ...], heads: int, queries: int, format: str, f16: bool) -> None:
    check(columns, heads, queries, format, f16, torch.device("cuda"))


@with_bindings
@pytest.mark.parametrize("format", list(SCALES))
@pytest.mark.parametrize(
    ("columns", "heads", "queries", "item_heads", "slices"),
    [
        ((128, 512), 64, 2, 64, 5),
        ((128, 300), 17, 3, 16, 3),
        ((128, 128), 100, 2, 64, 2),
        ((70, 1), 8, 3, 64, 1),
        ((200, 900), 64, 1, 32, 8),
        ((128, 1024), 20, 1, 8, 13),
        ((200, 900), 12, 1, 8, 16),
        ((40,), 64, 7, 32, 1),
        ((128, 300), 128, 4, 64, 1),
        ((0, 130), 8, 3, 64, 2),
        ((128, 640), 64, 2, 64, 1),
    ],
)
def test_attend_on_a_cpu(
    columns: tuple[int, ...],
    heads: int,
    queries: int,
    item_heads: int,
    slices: int,
    format: str,
    library: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels' own source, threads in an order of chance, in clusters or by two blocks."""
    from dsv4_plugin_hopper import attend, compiled
    from hopper_on_a_cpu import launcher

    monkeypatch.setattr(compiled, "launch", launcher(library))
    items = queries * -(-heads // item_heads)
    own = attend.Division(item_heads, items, slices, items if slices > 1 else 2)
    monkeypatch.setattr(attend, "division", lambda *arguments: own)
    check(columns, heads, queries, format, False, torch.device("cpu"))


@with_bindings
@pytest.mark.parametrize("format", list(SCALES))
@pytest.mark.parametrize("divided", [(64, 2, 1, 1), (64, 2, 3, 2), (2, 6, 4, 6)])
def test_what_is_broken_stays_where_it_is(
    divided: tuple[int, int, int, int], format: str, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query's head of NaN, sinks of NaN and infinity, a pool's scale of 0; in one block, or merged."""
    from dsv4_plugin_hopper import attend, compiled
    from hopper_on_a_cpu import launcher

    monkeypatch.setattr(compiled, "launch", launcher(library))
    monkeypatch.setattr(attend, "division", lambda *arguments: attend.Division(*divided))
    random, device = torch.Generator().manual_seed(1), torch.device("cpu")
    q = torch.randn(2, 5, 512, generator=random).bfloat16()
    cache, used = pool(format, 0.0, 64, random, device)
    own = attend.Pool(cache, used[torch.randint(len(used), (2, 200), generator=random)].int())
    due, _ = attend.attend(q, [own], SCALE, None)
    assert bool(due.isfinite().all())
    if format != "fp8_e4m3":
        assert float(due.float().norm()) > 1
    q[0, 0, 7] = float("nan")
    sinks = torch.full((5,), -math.inf)
    sinks[3], sinks[4] = float("nan"), math.inf
    out, lse = attend.attend(q, [own], SCALE, sinks, want_lse=True)
    assert lse is not None
    assert lse.isnan().nonzero().tolist() == [[0, 0]]
    assert bool(out[0, 0].isnan().all())
    assert bool(out[:, 3].isnan().all())
    assert torch.equal(out[0, [1, 2]], due[0, [1, 2]])
    assert torch.equal(out[1, [0, 1, 2]], due[1, [0, 1, 2]])
    assert not out[:, 4].any()


@with_bindings
@pytest.mark.parametrize(("slices", "blocks"), [(1, 2), (3, 4)])
def test_rows_of_slots_that_queries_share(
    slices: int, blocks: int, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Owners: as slots of their own."""
    from dsv4_plugin_hopper import attend, compiled
    from hopper_on_a_cpu import launcher

    monkeypatch.setattr(compiled, "launch", launcher(library))
    monkeypatch.setattr(attend, "division", lambda *arguments: attend.Division(64, 4, slices, blocks))
    random, device = torch.Generator().manual_seed(2), torch.device("cpu")
    q = torch.randn(4, 20, 512, generator=random).bfloat16()
    owners, lengths = torch.tensor([1, 0, 1, 1]).int(), torch.tensor([200, 5, 130, 0]).int()
    shared, own = [], []
    for size in (61, 64):
        cache, used = pool("fp8_ds_mla", 1.0, size, random, device)
        slots = used[torch.randint(len(used), (2, 200), generator=random)].int()
        shared.append(attend.Pool(cache, slots, lengths, owners))
        own.append(attend.Pool(cache, slots[owners.long()], lengths))
    out, lse = attend.attend(q, shared, SCALE, None, want_lse=True)
    due, due_lse = attend.attend(q, own, SCALE, None, want_lse=True)
    assert torch.equal(out, due)
    assert lse is not None
    assert due_lse is not None
    assert torch.equal(lse, due_lse)
    assert not out[3].any()
    assert bool((lse[3] == -math.inf).all())


@with_bindings
def test_what_is_refused() -> None:
    """What the kernel would read as something else. No queries and no heads are no launch."""
    from dsv4_plugin_hopper.attend import Pool, attend

    def own(format: str, slots: torch.Tensor) -> Pool:
        return Pool(pool(format, 1.0, 64, torch.Generator(), torch.device("cpu"))[0], slots)

    slots, q = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 4, 512).bfloat16()
    packed, plain = own("fp8_ds_mla", slots), own("bf16", slots)
    for pools, text in (
        ([], "Pools are of no rows; give one or two, of one of fp8_ds_mla, fp8_e4m3, bf16."),
        ([packed, plain], "Pools are of fp8_ds_mla, bf16; give one or two, of one of fp8_ds_mla, "),
        ([packed] * 3, "Pools are of fp8_ds_mla, fp8_ds_mla, fp8_ds_mla; give one or two, of one of "),
        ([own("bf16", slots.long())], "Slots are int64, 1 apart in a row; give int32, side by side."),
        ([own("bf16", slots[:, ::2])], "Slots are int32, 2 apart in a row; give int32, side by side."),
    ):
        with pytest.raises(ConfigError, match=text):
            attend(q, pools, SCALE, None)
    with pytest.raises(ConfigError, match="backend.operands=f16 would lose small weights of E4M3 rows,"):
        attend(q, [own("fp8_e4m3", slots)], SCALE, None, f16=True)
    for nothing in (q[:0], q[:, :0]):
        out, lse = attend(nothing, [packed], SCALE, None, want_lse=True)
        assert out.shape == nothing.shape
        assert lse is not None
        assert lse.shape == nothing.shape[:2]


@with_bindings
def test_pages_that_cannot_be_loaded() -> None:
    from dsv4_plugin_hopper.attend import Pool, attend

    layout = replace(cache_layout(PRESETS["v4_flash"], "fp8_ds_mla", "fp8").window, page_alignment=8)
    cache = allocate_cache(layout, 2, 61, torch.device("cpu"), page_stride_bytes=61 * 584 + 16)
    own = Pool(cache, torch.zeros(1, 8, dtype=torch.int32))
    with pytest.raises(ConfigError, match="Pages are 35,640 bytes apart, and rows are loaded 16 bytes at a"):
        attend(torch.zeros(1, 4, 512).bfloat16(), [own], SCALE, None)


@with_bindings
def test_a_failed_call() -> None:
    from cuda.bindings import driver
    from dsv4_plugin_hopper import compiled

    status = driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(DSV4Error, match=r"CUresult: CUDA_ERROR_NO_BINARY_FOR_GPU \(209\); update the driver"):
        compiled._checked((status, None), compiled.LOADING)
    with pytest.raises(DSV4Error, match=r"CUresult: CUDA_ERROR_NO_BINARY_FOR_GPU \(209\)\.$"):
        compiled._checked((status,))


@on_a_gpu
def test_a_thread_that_has_called_nothing() -> None:
    """It has no context yet."""
    from dsv4_plugin_hopper.attend import Pool, attend

    device = torch.device("cuda")
    cache, used = pool("bf16", 1.0, 64, torch.Generator().manual_seed(3), device)
    q, own = torch.ones(1, 4, 512, device=device).bfloat16(), Pool(cache, used[None, :64].int())
    due, _ = attend(q, [own], SCALE, None)
    with ThreadPoolExecutor(1) as threads:
        out, _ = threads.submit(attend, q, [own], SCALE, None).result()
    assert torch.equal(out, due)


@with_bindings
@pytest.mark.parametrize("damage", [b"", slice(4000), slice(-1), b"!"])
def test_a_damaged_file(damage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled once more, and kept; the driver has crashed over half of one. A whole one is loaded."""
    from dsv4_plugin_hopper import compiled

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[bytes] = []
    monkeypatch.setattr(compiled, "_compile", lambda *own: made.append(b"compiled" * 999) or made[-1])
    monkeypatch.setattr(compiled.nvrtc, "nvrtcVersion", lambda: (0, 13, 0))
    assert compiled.cubin() == compiled.cubin() == b"compiled" * 999
    assert len(made) == 1
    (kept,) = (tmp_path / "dsv4core" / "hopper").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[damage] if isinstance(damage, slice) else whole[: -len(damage) or 0] + damage)
    assert compiled.cubin() == b"compiled" * 999
    assert kept.read_bytes() == whole
    assert len(made) == 2


@on_a_gpu
@pytest.mark.parametrize("name", ["packed_bf16", "codes_bf16", "wide_bf16"])
def test_no_register_is_spilled(name: str) -> None:
    from cuda.bindings import driver
    from dsv4_plugin_hopper import compiled

    torch.zeros(1, device="cuda")
    bytes_of_a_thread = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
    function = compiled.function(name, torch.cuda.current_device())
    assert compiled._checked(driver.cuFuncGetAttribute(bytes_of_a_thread, function)) == 0


@with_bindings
def test_a_home_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled in each process."""
    from dsv4_plugin_hopper import compiled

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.setattr(compiled, "_compile", lambda source, header: b"made")
    monkeypatch.setattr(compiled.nvrtc, "nvrtcVersion", lambda: (0, 13, 0))
    assert compiled.cubin() == b"made"


@with_bindings
def test_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By NVRTC where that is installed, once."""
    from dsv4_plugin_hopper import compiled

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        first = compiled.cubin()
    except RuntimeError as error:  # cuda-bindings without the library
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    assert first[:4] == b"\x7fELF"
    monkeypatch.setattr(compiled, "_compile", None)
    assert compiled.cubin() == first


@with_bindings
def test_places_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks/trace_hopper.py` finds its lines in the source."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    from trace_hopper import PLACES, traced

    source = traced()
    assert all(f"mark(work, tile, {place}, warp, lane);" in source for place in range(len(PLACES)))
