"""Cached bytes in both flavours of FP8, and the core's kernels on them, interpreted where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import stub_aiter
import torch
from dsv4_plugin_rocm_aiter import plugin
from dsv4_plugin_rocm_aiter.layer import Layer, SharedStep
from stub_aiter import Install

from dsv4core.api import C4A, C128A, SWA, KVCacheFormat, LayerKind, LayerWeights, Limits, Request, Weight
from dsv4core.kvcache import allocate_cache, with_fp8_flavour
from dsv4core.model.shapes import PRESETS
from dsv4core.testing.case import Case
from dsv4core.testing.host import Host
from dsv4core.testing.suite.test_attention import STEPS

INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU to run them"
)
MODEL = PRESETS["v4_flash"]
PAGE = 5


def format_of(arch: str, name: str, pool: str) -> KVCacheFormat:
    """The format that the backend keeps a pool in."""
    limits = Limits(64, 8, 4096, 64)
    request = Request("rocm", arch, MODEL, 64, limits, kv_cache_dtype=name, probe="static")
    found = getattr(plugin.dsv4_resolve_kv_cache(request), pool)
    assert isinstance(found, KVCacheFormat)
    return found


@pytest.mark.parametrize(
    ("arch", "pool", "dtype", "bias", "largest"),
    [
        ("gfx942", "window", torch.float8_e4m3fnuz, 8, 224),
        ("gfx942", "compressed", torch.float8_e4m3fn, 7, 448),
        ("gfx950", "window", torch.float8_e4m3fn, 7, 448),
    ],
)
def test_packed_pages_byte_by_byte(arch: str, pool: str, dtype: torch.dtype, bias: int, largest: int) -> None:
    """Codes and rotary bf16 of all rows, then 8 bytes of scales each; a negative slot stores nothing."""
    cache = allocate_cache(format_of(arch, "fp8_ds_mla", pool), 2, PAGE)
    cache.pool.fill_(0xAA)
    rows = torch.zeros(2, 512)
    rows[0, :64], rows[0, 64:128], rows[0, 448:] = 1.5, torch.tensor([largest * 4.0, -3.0] * 32), -2.0
    cache.write(torch.tensor([PAGE + 2, -1]), rows)
    page = cache.pool.view(torch.uint8).as_strided((2, cache.page_stride_bytes), (cache.page_stride_bytes, 1))
    data = page[1, 2 * 576 : 3 * 576]
    scales = page[1, PAGE * 576 + 2 * 8 : PAGE * 576 + 3 * 8].tolist()
    # 1.5 is brought near the largest code: 1.5 * 2^e <= largest; and 4 * largest needs 2^2.
    exponent = 0
    while 1.5 * 2 ** (exponent + 1) <= largest:
        exponent += 1
    assert scales[:2] == [127 - exponent, 129]
    assert scales[7] == 0
    value = 1.5 * 2**exponent
    sign_exponent_mantissa = (int(value).bit_length() - 1 + bias) << 3 | 0b100
    assert data[:64].tolist() == [sign_exponent_mantissa] * 64
    assert data[64:128].view(dtype).float().tolist() == [float(largest), -0.75] * 32
    assert data[448:].view(torch.bfloat16).tolist() == [-2.0] * 64
    assert bool((page[0, : PAGE * 584] == 0xAA).all())
    untouched = torch.cat([page[1, : 2 * 576], page[1, 3 * 576 : PAGE * 576 + 16]])
    assert bool((untouched == 0xAA).all())
    assert torch.equal(cache.read(torch.tensor([PAGE + 2]))[0], rows[0])


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_plain_pages_byte_by_byte(arch: str) -> None:
    """Rows of 512 bf16 values by slot, in both pools, on both chips."""
    for pool in ("window", "compressed"):
        cache = allocate_cache(format_of(arch, "bf16", pool), 2, PAGE)
        row = torch.randn(1, 512)
        cache.write(torch.tensor([PAGE + 3]), row)
        flat = cache.pool.flatten(0, 1)
        assert torch.equal(flat[PAGE + 3], row[0].bfloat16())
        assert flat.data_ptr() == cache.pool.data_ptr()
        assert int(flat.any(-1).sum()) == 1


def test_one_flavour_read_as_the_other() -> None:
    """Half or twice the value, and NaN for a zero with a sign: far beyond what a comparison lets pass."""
    own = format_of("gfx942", "fp8_ds_mla", "window")
    other = format_of("gfx942", "fp8_ds_mla", "compressed")
    rows = torch.randn(PAGE, 512, generator=torch.Generator().manual_seed(0))
    slots = torch.arange(PAGE)
    for written, read, factor in ((own, other, 2.0), (other, own, 0.5)):
        cache = allocate_cache(written, 1, PAGE)
        cache.write(slots, rows)
        assert float((cache.read(slots) - rows).abs().max()) < 0.2
        wrong = replace(cache, format=read).read(slots)[:, :448]
        right = cache.read(slots)[:, :448]
        finite = wrong.isfinite() & (right.abs() > 0.1)
        assert int(finite.sum()) > 1000
        torch.testing.assert_close(wrong[finite], right[finite] * factor)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(wrong, right, rtol=0.1, atol=0.1)
    assert torch.tensor([0x80], dtype=torch.uint8).view(torch.float8_e4m3fnuz).float().isnan()
    assert torch.tensor([0x80], dtype=torch.uint8).view(torch.float8_e4m3fn).float() == 0


def test_aiter_reads_packed_rows_as_the_core_writes_them() -> None:
    """The stub's reader, which is independent of the codecs: OCP's codes, and no others."""
    rows, slots = torch.randn(2 * PAGE, 512), torch.arange(2 * PAGE)
    for flavour, same in (("e4m3fn", True), ("e4m3fnuz", False)):
        format = with_fp8_flavour(format_of("gfx950", "fp8_ds_mla", "window"), flavour)  # type: ignore[arg-type]
        cache = allocate_cache(format, 2, PAGE, page_stride_bytes=format.page_bytes(PAGE) + 576)
        cache.write(slots, rows)
        found, due = stub_aiter.read_blocks(cache.pool, slots).float(), cache.read(slots)
        assert torch.allclose(found, due, rtol=2**-8) == same


@INTERPRETED
@pytest.mark.parametrize("format", ["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("kind", [SWA, C4A, C128A], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_kernels_of_gfx942(install: Install, kind: LayerKind, format: str, dtype: torch.dtype) -> None:
    """FNUZ windows beside OCP entries, with the kernels of tables and attention that the chip would run."""
    host = Host(install("gfx942"), Case(kind, heads=9, kv_cache_dtype=format))
    assert isinstance(host.plan, plugin.Plan)
    plan = replace(host.plan, core_ops="triton")
    own = Layer(host.spec, plan, LayerWeights({"attn_sink": Weight(host.sinks)}, host.rope), host.device)
    state = SharedStep(host.request, kind, plan, host.device)
    step = host.step((2000, 129, 0), (1, 1, 3))
    q, selected = host.query(step).to(dtype), host.select(step)
    state.plan(step)
    out: Any = own.forward_mqa(q, host.caches, selected, step, state, True, True)
    due, lse = host.expected(step, q, selected, host.sinks)
    bound = 1e-5 if dtype == torch.float32 else 2**-7
    off = (out.data.double() - due).norm(dim=-1) / due.norm(dim=-1)
    assert float(off.max()) < bound
    torch.testing.assert_close(out.lse.double(), lse, rtol=1e-4, atol=1e-3)


@INTERPRETED
def test_the_lists_of_gfx950(install: Install) -> None:
    """Written by kernels, they are the same as the definition's."""
    subject = install("gfx950")
    for kind in (SWA, C128A):
        host = Host(subject, Case(kind, heads=8))
        assert isinstance(host.plan, plugin.Plan)
        states = [
            SharedStep(host.request, kind, replace(host.plan, core_ops=core), host.device)
            for core in ("torch", "triton")
        ]
        step = host.step(*STEPS["mixed"])
        for state in states:
            state.plan(step)
        for name in ("window_lists", "entry_lists"):
            one, other = (getattr(state, name) for state in states)
            if one is not None:
                total = int(one.starts[-1])
                assert torch.equal(one.starts, other.starts)
                assert torch.equal(one.indices[:total], other.indices[:total])
                assert total > 0
