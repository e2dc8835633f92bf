"""The prefill gather plan against its golden vector and its bound."""

import random

import pytest

from dsv4core.api import C4A, C128A, SWA, Limits
from dsv4core.step import GatherChunk, gather_area, gathered_tokens, plan_gather


def test_golden_plan():
    area = gather_area(C4A, Limits(128, 8, 1024, 128), window=64)
    assert area == 4 * (256 + 64 + 128)
    plan = list(plan_gather([4] * 5, [80, 96, 112, 128, 144], C4A, 64, area))
    assert plan == [GatherChunk(0, 5, entries=36, rows=103)]


def test_workspace_of_the_largest_model():
    area = gather_area(C4A, Limits(8192, 64, 1 << 20, 8192), window=128)
    assert area * 512 * 2 == 1_107_820_544  # bytes of bf16 rows


@pytest.mark.parametrize("kind", [SWA, C4A, C128A])
def test_chunks_cover_all_requests_and_stay_within_the_area(kind):
    rng = random.Random(0)
    limits = Limits(512, 32, 4096, 512)
    area = gather_area(kind, limits, 128)
    for _ in range(50):
        total = [rng.randint(1, 4096) for _ in range(rng.randint(1, 32))]
        query = [rng.randint(0, min(n, 512)) for n in total]
        chunks = list(plan_gather(query, total, kind, 128, area))
        assert [i for c in chunks for i in range(c.first, c.end)] == list(range(len(total)))
        for c in chunks:
            assert (c.end - c.first) * c.rows <= area
            for i in range(c.first, c.end):
                assert kind.visible_entries(total[i]) <= c.entries
                assert gathered_tokens(query[i], total[i], 128) <= c.rows - c.entries


def test_a_request_that_does_not_fit_is_alone():
    assert list(plan_gather([9, 1], [9, 1], SWA, 4, 5)) == [GatherChunk(0, 1, 0, 9), GatherChunk(1, 2, 0, 1)]
    assert list(plan_gather([], [], SWA, 4, 5)) == []
