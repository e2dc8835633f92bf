"""The cases of FlashMLA's own tests for packed rows, at its tolerances, against float32 on the same bytes.

On a GPU all of them; on a CPU a few, on the stub.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from dsv4core.kvcache import KVCache, allocate_cache, cache_layout
from dsv4core.model.shapes import PRESETS

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
FORMAT = cache_layout(PRESETS["v4_flash"], "fp8_ds_mla", "fp8").window
SCALE = 512**-0.5
ROWS = 40_000 if GPU else 1200
TURN = 64
"""Queries that the definition attends at a time."""


def values(*size: int, random: torch.Generator) -> torch.Tensor:
    """As small as FlashMLA's tests have them: so are their tolerances."""
    return (torch.randn(*size, generator=random) / 10).clamp(-1, 1).bfloat16().to(DEVICE)


def poisoned(page_size: int, random: torch.Generator) -> tuple[KVCache, torch.Tensor]:
    """A pool in which half of the rows are NaN, and the slots of the others."""
    pages = -(-ROWS // page_size)
    cache = allocate_cache(FORMAT, pages, page_size, DEVICE)
    cache.pool.fill_(0xFF)
    used = torch.randperm(pages * page_size, generator=random)[: pages * page_size // 2].to(DEVICE)
    cache.write(used, values(len(used), 512, random=random).float())
    return cache, used


def table(
    used: torch.Tensor, tokens: int, width: int, lengths: bool, random: torch.Generator, multiple: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots with holes, a row of nothing, and columns of nothing up to a multiple; how many of a row count.

    Those are all, or as chance has it, and none of the first row.
    """
    slots = used[torch.randint(len(used), (tokens, width), generator=random).to(DEVICE)].int()
    slots[(torch.rand(tokens, width, generator=random) < 0.1).to(DEVICE)] = -1
    slots[tokens // 2] = -1
    slots = torch.nn.functional.pad(slots, (0, -width % multiple), value=-1)
    count = torch.full((tokens,), slots.shape[1])
    if lengths:
        count = torch.randint(width + 1, (tokens,), generator=random)
        count[0] = 0
    return slots, count.int().to(DEVICE)


def attended(
    q: torch.Tensor, pools: list[tuple[KVCache, torch.Tensor, torch.Tensor]], sinks: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs and log-sum-exps in float32, of some queries at a time."""
    for own in torch.arange(len(q), device=DEVICE).split(TURN):
        rows, named = [], []
        for cache, slots, lengths in pools:
            seen = torch.arange(slots.shape[1], device=DEVICE) < lengths[own, None]
            named.append(seen & (slots[own] >= 0))
            rows.append(cache.read(slots[own].clamp_min(0).flatten()).view(*slots[own].shape, 512))
        known = torch.cat(named, dim=1)[:, None]
        keys = torch.cat(rows, dim=1).masked_fill(~known.transpose(1, 2), 0.0)
        scores = torch.einsum("thd,tkd->thk", q[own].float(), keys) * SCALE
        lse = scores.masked_fill(~known, -math.inf).logsumexp(-1)
        weights = torch.where(known, (scores - lse[..., None]).exp(), 0.0)
        out = torch.einsum("thk,tkd->thd", weights, keys)
        if sinks is not None:
            out = out * torch.where(lse == -math.inf, 0.0, torch.sigmoid(lse - sinks))[..., None]
        yield out, lse


def check(found: torch.Tensor, due: torch.Tensor, absolute: float, relative: float, cosine: float) -> None:
    """FlashMLA's comparison: each value near by either measure, and all of them by their direction."""
    infinite = due.isinf()
    assert torch.equal(found[infinite], due[infinite])
    found, due = found[~infinite].double(), due[~infinite].double()
    far = ((found - due).abs() > absolute) & ((found - due).abs() > relative * due.abs())
    assert not far.any(), (
        f"{int(far.sum())} of {far.numel()} are off, by up to {float((found - due).abs().max())}."
    )
    both = (found.square() + due.square()).sum()
    assert float(1 - 2 * (found * due).sum() / both.clamp_min(1e-12)) < cosine or not both


def random_sinks(heads: int, random: torch.Generator) -> torch.Tensor:
    """Ordinary ones, and both infinities."""
    sinks = torch.randn(heads, generator=random) * 3
    sinks[0], sinks[heads // 2] = math.inf, -math.inf
    return sinks.to(DEVICE)


CASES = [
    (heads, batch, queries, page, width)
    for heads in (64, 128)
    for batch, queries in ((4, 1), (74, 1), (321, 1), (4, 3), (74, 3), (321, 3))
    for page in (2, 61, 64, 69, 576)
    for width in (64, 576, 2048)
]
SOME = ((True, True, True), (True, False, False), (False, True, True))
FEW = [(64, 4, 1, 64, 64), (128, 4, 3, 61, 128)]


@pytest.mark.parametrize(("heads", "batch", "queries", "page", "width"), CASES if GPU else FEW)
def test_decode(stub: None, heads: int, batch: int, queries: int, page: int, width: int) -> None:
    """With and without a second pool, lengths and sinks; the same case twice gives the same bits."""
    from dsv4_plugin_flashmla import calls

    random, tokens = torch.Generator().manual_seed(page + width), batch * queries
    q = values(tokens, heads, 512, random=random)
    multiple = 64 if heads == 64 else 128
    caches = [poisoned(size, random) for size in (page, 64)]
    every = product((True, False), repeat=3)
    for more, lengths, with_sinks in every if page == 64 else SOME:
        pools = [
            (cache, *table(used, tokens, columns, lengths, random, multiple))
            for (cache, used), columns in zip(caches, (width, 128)[: 1 + more], strict=False)
        ]
        if more and not lengths:
            pools.reverse()  # the wide one, with pages of any size, is the further one
        sinks = random_sinks(heads, random) if with_sinks else None
        arguments = (q, [calls.Pool(*own) for own in pools], SCALE, sinks)
        out, lse = calls.decode(*arguments, calls.schedule())
        again, _ = calls.decode(*arguments, calls.schedule())
        assert torch.equal(out, again)
        due, due_lse = (torch.cat(own) for own in zip(*attended(q, pools, sinks), strict=True))
        check(out, due, 1e-3, 2.01 / 128, 5e-6)
        check(calls.contract_lse(lse, heads), due_lse, 1e-6, 8.01 / 65536, 1e-6)


@pytest.mark.parametrize(
    ("heads", "tokens", "width"), [(64, 5, 640), (128, 130 if GPU else 7, 1152), (64, 1, 128)]
)
def test_prefill(stub: None, heads: int, tokens: int, width: int) -> None:
    """Half of the rows are NaN, and nothing names them."""
    from dsv4_plugin_flashmla import calls

    random = torch.Generator().manual_seed(width)
    q = values(tokens, heads, 512, random=random)
    cache, used = poisoned(64, random)
    slots, lengths = table(used, tokens, width, True, random)
    slots[torch.arange(width, device=DEVICE) >= lengths[:, None]] = -1  # or their NaN might come through
    rows = cache.read(torch.arange(cache.num_pages * 64, device=DEVICE)).bfloat16()
    for sinks in (random_sinks(heads, random), None):
        out, lse = calls.prefill(q, rows, slots, lengths, SCALE, sinks)
        due, due_lse = (
            torch.cat(own) for own in zip(*attended(q, [(cache, slots, lengths)], sinks), strict=True)
        )
        check(out, due, 1e-3, 2.01 / 128, 5e-6)
        check(calls.contract_lse(lse, heads), due_lse, 1e-6, 8.01 / 65536, 1e-6)
