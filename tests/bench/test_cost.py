"""Bytes and operations, counted by hand."""

from __future__ import annotations

import pytest

from dsv4core.api import C4A, C128A, SWA
from dsv4core.bench.cost import Ceilings, Cost, costs
from dsv4core.bench.workload import Workload
from dsv4core.kvcache import cache_layout
from dsv4core.model.shapes import PRESETS, layer_spec

FLASH = PRESETS["v4_flash"]
SPEC = layer_spec(FLASH, FLASH.layer_kinds.index(C4A))
PACKED = cache_layout(FLASH, "fp8_ds_mla", "fp8")


def cost(operation: str, workload: Workload) -> Cost:
    spec = layer_spec(FLASH, FLASH.layer_kinds.index(workload.kind))
    return costs(spec, PACKED, workload, "bfloat16")[operation]


@pytest.mark.parametrize("tokens", [1, 64])
def test_decode(tokens: int) -> None:
    """584 bytes a row and 2,048 a head; 2,048 operations a head and row."""
    found = cost("forward_mqa", Workload("decode", C4A, tokens, 16384))
    assert found == Cost(tokens * (584 * 640 + 2048 * 64), tokens * 2048 * 64 * 640)


def test_a_prefill_reads_the_window_once() -> None:
    found = cost("forward_mqa", Workload("prefill", SWA, 512, 4096))
    assert found == Cost((127 + 512) * 584 + 512 * 2048 * 64, 512 * 2048 * 64 * 128)


def test_a_prefill_reads_no_more_entries_than_there_are() -> None:
    found = cost("forward_mqa", Workload("prefill", C128A, 256, 1024))
    pairs = 256 * 128 + sum((768 + i + 1) // 128 for i in range(256))
    assert found == Cost((127 + 256 + 8) * 584 + 256 * 2048 * 64, pairs * 2048 * 64)


def test_the_first_tokens_see_little() -> None:
    found = cost("forward_mqa", Workload("prefill", SWA, 3, 1))
    assert found == Cost(3 * 584 + 3 * 2048 * 64, (1 + 2 + 3) * 2048 * 64)


def test_projection_reads_its_weights_as_fp8() -> None:
    found = cost("o_proj", Workload("decode", C4A, 1, 4096))
    weights = 8 * 1024 * 4096 + 4096 * 8 * 1024
    assert found == Cost(weights + 64 * 1024 + 4096 * 2, fp8_flops=2 * weights)
    assert cost("o_proj.wo_a", Workload("decode", C4A, 1, 4096)).fp8_flops == weights


def test_indexer_reads_every_visible_key() -> None:
    found = cost("indexer.logits", Workload("decode", C4A, 2, 4096))  # requests of 4,097 and 4,095 tokens
    prompt = cost("indexer.logits", Workload("prefill", C4A, 8, 8))
    assert prompt.fp8_flops == 2 * (0 + 0 + 0 + 1 + 1 + 1 + 1 + 2) * 64 * 128
    assert found.bytes == (1024 + 1023) * (132 + 4) + 2 * 64 * 128
    assert found.fp8_flops == 2 * (1024 + 1023) * 64 * 128


def test_a_layer_is_the_sum() -> None:
    workload = Workload("mixed", C4A, 6, 4096)
    everything = costs(SPEC, PACKED, workload, "bfloat16")
    parts = ("project", "insert_kv", "compress", "indexer", "forward_mqa", "o_proj")
    assert everything["layer"] == sum((everything[name] for name in parts), Cost(0))


def test_a_rank_reads_its_share() -> None:
    rank = layer_spec(FLASH, SPEC.index, tp_size=8)
    workload = Workload("decode", C4A, 1, 4096)
    whole, part = (costs(spec, PACKED, workload, "bfloat16")["o_proj"] for spec in (SPEC, rank))
    assert part.fp8_flops * 8 == whole.fp8_flops


def test_projections_are_shared_by_ranks() -> None:
    rank = layer_spec(FLASH, SPEC.index, tp_size=8)
    workload = Workload("decode", SWA, 1, 4096)
    window = layer_spec(FLASH, 0)
    assert window.kind == SWA
    found = costs(window, PACKED, workload, "bfloat16")["project"]
    shared, own = 4096 * 1024 + 512 * 4096, 1024 * 32768
    assert found.fp8_flops == 2 * (shared + own)
    part = costs(layer_spec(FLASH, 0, tp_size=8), PACKED, workload, "bfloat16")["project"]
    assert part.fp8_flops == 2 * (shared + own // 8)
    assert rank.num_heads == 8


def test_a_decode_completes_an_entry_or_none() -> None:
    state = 2 * 512 * 4
    assert cost("compress", Workload("decode", C128A, 1, 1023)) == Cost(2 * state, 0)
    assert cost("compress", Workload("decode", C128A, 1, 1024)) == Cost(2 * state + 127 * state + 584, 0)
    chunk = cost("compress", Workload("prefill", C128A, 256, 1024))
    assert chunk == Cost((256 + 128) * state + 2 * 584, 0)  # states of the last 128 tokens are kept
    odd = cost("compress", Workload("prefill", C128A, 100, 1000))  # 900 to 999, and an entry of 768 to 895
    assert odd == Cost(2 * 100 * state, 0)
    across = cost("compress", Workload("prefill", C128A, 100, 1050))  # the entry of 896 to 1,023
    assert across == Cost(2 * 100 * state + (950 - 896) * state + 584, 0)


def test_a_batch_completes_what_its_lengths_complete() -> None:
    state = 2 * 512 * 4
    workload = Workload("decode", C128A, 128, 1100)
    assert [length for length in workload.total if length % 128 == 0] == [1152]
    assert cost("compress", workload) == Cost(128 * 2 * state + 127 * state + 584, 0)


def test_a_batch_reads_what_its_lengths_are() -> None:
    """Below the top-k every request reads its own entries: 8 requests of 1,020 … 1,028 tokens."""
    entries = sum(length // 4 for length in (1025, 1023, 1026, 1022, 1027, 1021, 1028, 1020))
    found = cost("forward_mqa", Workload("decode", C4A, 8, 1024))
    assert found.flops == 2048 * 64 * (8 * 128 + entries)
    assert found.bytes == 584 * (8 * 128 + entries) + 8 * 2048 * 64


def test_the_floor_is_the_slower_of_both() -> None:
    ceilings = Ceilings(copy_gbps=4000.0, matmul_tflops=600.0, fp8_tflops=1200.0)
    assert ceilings.floor_us(Cost(4_000_000, 0)) == pytest.approx(1.0)
    assert ceilings.floor_us(Cost(4_000_000, 1_200_000_000)) == pytest.approx(2.0)
    assert ceilings.floor_us(Cost(4_000_000, 1_200_000_000, 1_200_000_000)) == pytest.approx(3.0)


def test_steps() -> None:
    mixed = Workload("mixed", SWA, 9, 100)
    assert (mixed.query, mixed.total, mixed.decodes) == ((1, 1, 1, 1, 5), (101, 99, 102, 98, 100), 4)
    assert Workload("mixed", SWA, 2, 100).decodes == 2, "one query token with a context is a decode"
    assert Workload("prefill", SWA, 512, 100).total == (512,)
    assert Workload("decode", C128A, 3, 1 << 20).width(FLASH) == 8320


@pytest.mark.parametrize("context", [1, 2, 17, 4096, 1 << 20])
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 512])
def test_contexts_of_a_batch_lie_around_the_asked_one(tokens: int, context: int) -> None:
    total = Workload("decode", C4A, tokens, context).total
    assert total == Workload("decode", C4A, tokens, context).total
    assert sum(total) == tokens * context
    assert min(total) >= 1
    assert max(total) <= context + 64
    assert len({length % 4 for length in total}) == min(4, len(set(total)))


def test_a_large_batch_has_every_remainder() -> None:
    total = Workload("decode", C128A, 256, 4096).total
    assert {length % 128 for length in total} == set(range(128))
    assert Workload("decode", C128A, 256, 4096).width(FLASH) == 128 + 32, "that of the asked context"
