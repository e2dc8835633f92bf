"""The adapter over metadata that vLLM 0.32 made: mixed batches, chunks, decodes, each layer kind.

`recorded/steps.jsonl` is written by the engine job. The caches are made here: rows that count hold seeded
numbers, all others NaN. What is expected is computed from the metadata alone, one query at a time.
"""

from __future__ import annotations

import json
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4core.api import KVCacheFormat
from dsv4core.kvcache import KVCache

LINES = [
    json.loads(line) for line in (Path(__file__).parent / "recorded" / "steps.jsonl").read_text().splitlines()
]
WINDOW_SIZE = 128


def steps() -> dict[int, list[dict[str, Any]]]:
    """The lines by layer, in the order of their steps."""
    found = defaultdict(list)
    for line in LINES:
        found[int(line["prefix"].split(".")[2])].append(line)
    return found


STEPS = steps()
CASES = [(layer, number) for layer, lines in STEPS.items() for number in range(len(lines))]


def test_the_recording_has_what_matters() -> None:
    ratios = {line["ratio"] for line in LINES}
    batches = {(line["window"]["num_decodes"] > 0, line["window"]["num_prefills"] > 0) for line in LINES}
    assert ratios == {1, 4, 128}
    assert batches == {(False, True), (True, True), (True, False)}
    continued = [line for line in LINES if line["window"]["num_prefills"] and min(line["positions"]) > 0]
    assert continued, "a chunk that is not a prompt's first"
    assert any(line["window"]["page_stride"] > line["window"]["cache"][1] * 584 for line in LINES)


def tensor(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


class Pool:
    """A cache as vLLM lends it, `[pages, rows, bytes]`, pages apart as recorded; NaN where nothing counts."""

    def __init__(self, group: dict[str, Any], format: KVCacheFormat, slots_of: list[list[int]]) -> None:
        pages, rows, width = group["cache"]
        storage = torch.full((pages * group["page_stride"],), 255, dtype=torch.uint8)
        self.tensor = storage.as_strided((pages, rows, width), (group["page_stride"], width, 1))
        self.cache = KVCache(self.tensor, format)
        slots = torch.tensor(sorted({slot for slots in slots_of for slot in slots}))
        self.cache.write(slots, torch.randn(len(slots), 512))


def expectation(line: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Slots in the window cache and in the compressed cache that each query attends."""
    window, main = line["window"], line["main"]
    rows, table = window["block_size"], window["block_table"]
    windows, entries = [], []
    for token, request in enumerate(window["token_to_req_indices"][: tokens_of(line)]):
        position = line["positions"][token]
        seen = range(max(0, position - WINDOW_SIZE + 1), position + 1)
        windows.append([table[request][p // rows] * rows + p % rows for p in seen])
        if main is None:
            entries.append([])
            continue
        size = main["block_size"] // line["ratio"]
        visible = range((position + 1) // line["ratio"])
        chosen = line["topk"][token] if line["ratio"] == 4 else visible
        assert set(chosen) <= set(visible)
        entries.append([main["block_table"][request][e // size] * size + e % size for e in chosen])
    return windows, entries


def tokens_of(line: dict[str, Any]) -> int:
    return int(line["window"]["num_decode_tokens"] + line["window"]["num_prefill_tokens"])


def attend(q: torch.Tensor, sinks: torch.Tensor, pools: list[tuple[Pool, list[list[int]]]]) -> torch.Tensor:
    """Plain attention, a query at a time, in fp32 on the cached bytes."""
    out = torch.empty_like(q)
    for token, query in enumerate(q.float()):
        keys = torch.cat(
            [pool.cache.read(torch.tensor(slots[token])) for pool, slots in pools if slots[token]]
        )
        scores = torch.cat((query @ keys.T * 512**-0.5, sinks[:, None]), 1)
        out[token] = (scores.softmax(-1)[:, :-1] @ keys).to(out.dtype)
    return out


@pytest.fixture
def layers(vllm: None, config: Any) -> dict[int, Any]:
    """The model's attention layers, made as vLLM makes them."""
    made = config({"backend": "reference"})
    make_layer = import_module("vllm.models.deepseek_v4.cpu.model").make_layer
    buffer = torch.full((512, 512), -1, dtype=torch.int32)
    layers = {}
    for index in STEPS:
        layers[index] = make_layer(made, f"model.layers.{index}.attn", topk_indices_buffer=buffer)
        layers[index].attn_sink.data = torch.randn(8)
    return layers


def test_every_recorded_step(layers: dict[int, Any]) -> None:
    from vllm.forward_context import set_forward_context

    for index, number in CASES:
        line, layer = STEPS[index][number], layers[index]
        layout = layer._dsv4_host.selection.layout
        windows, entries = expectation(line)
        pools = [(Pool(line["window"], layout.window, windows), windows)]
        layer.swa_cache_layer.kv_cache = pools[0][0].tensor
        if line["main"] is not None:
            pools.append((Pool(line["main"], layout.compressed, entries), entries))
            layer.compressor, layer.kv_cache = object(), pools[1][0].tensor
        set_forward_context(metadata(line))
        positions = tensor(line["positions"], torch.int64)
        for token, chosen in enumerate(line.get("topk", ())):
            layer.topk_indices_buffer[token] = -1
            layer.topk_indices_buffer[token, : len(chosen)] = tensor(chosen)
        q = torch.randn(line["q"], dtype=torch.float32).bfloat16()
        output = torch.full_like(q, torch.nan)
        layer.forward_mqa(q, torch.empty(0), positions, output)
        tokens = tokens_of(line)
        expected = attend(q[:tokens], layer.attn_sink.data, pools)
        torch.testing.assert_close(output[:tokens], expected, atol=2e-2, rtol=2e-2)
        assert output[tokens:].isnan().all()


TABLES = {"window": torch.zeros(4, 64, dtype=torch.int32), "main": torch.zeros(4, 16, dtype=torch.int32)}


def block_table(group: str, rows: list[list[int]]) -> torch.Tensor:
    """As vLLM does: a view of a buffer that stays where it is."""
    table = TABLES[group][: len(rows)]
    table.copy_(tensor(rows))
    return table


def metadata(line: dict[str, Any]) -> dict[str, Any]:
    from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadata
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

    window, prefix = line["window"], line["prefix"]
    counts = ("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens", "block_size")
    found: dict[str, Any] = {
        f"{prefix}.swa_cache": DeepseekSparseSWAMetadata(
            block_table=block_table("window", window["block_table"]),
            slot_mapping=tensor(window["slot_mapping"], torch.int64),
            seq_lens=tensor(window["seq_lens"]),
            query_start_loc=tensor(window["query_start_loc"]),
            token_to_req_indices=tensor(window["token_to_req_indices"]),
            **{name: window[name] for name in counts},
        )
    }
    if line["main"] is not None:
        main = line["main"]
        found[prefix] = DeepseekV4FlashMLAMetadata(
            block_table("main", main["block_table"]),
            tensor(main["slot_mapping"], torch.int64),
            main["block_size"],
        )
    return found


def test_layers_of_a_kind_plan_a_step_once(layers: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.forward_context import set_forward_context

    from dsv4core.backends.reference_layer import ReferenceStep

    planned: list[str] = []
    plan = ReferenceStep.plan

    def counting(self: Any, step: Any) -> None:
        planned.append(self.kind.name)
        plan(self, step)

    monkeypatch.setattr(ReferenceStep, "plan", counting)
    line = next(line for line in STEPS[1] if line["window"]["num_prefills"] == 0)
    of_layer_1 = metadata(line)
    both = of_layer_1 | {name.replace(".1.", ".3."): found for name, found in of_layer_1.items()}
    layout = layers[1]._dsv4_host.selection.layout
    windows, entries = expectation(line)
    window = Pool(line["window"], layout.window, windows)
    main = Pool(line["main"], layout.compressed, entries)
    q = torch.zeros(line["q"], dtype=torch.bfloat16)

    def forward(index: int) -> None:
        layer = layers[index]
        layer.swa_cache_layer.kv_cache, layer.compressor, layer.kv_cache = (
            window.tensor,
            object(),
            main.tensor,
        )
        layer.forward_mqa(q, q, tensor(line["positions"], torch.int64), torch.empty_like(q))

    set_forward_context(both)
    forward(1)
    forward(3)
    assert planned == ["c4a"]
    set_forward_context(both)  # the next step of a draft: the same metadata with other values
    forward(1)
    assert planned == ["c4a", "c4a"]


def test_the_profile_run_takes_the_workspace(layers: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.forward_context import set_forward_context

    set_forward_context(None)
    q = torch.ones(4, 8, 512, dtype=torch.bfloat16)
    output = torch.full_like(q, torch.nan)
    taken: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: taken.append(size[0]) or empty(*size, **how))
    layers[1].forward_mqa(q, q, torch.arange(4), output)
    assert taken == [layers[1]._dsv4_host.selection.plans["c4a"].workspace_bytes]
    assert not output.any()


def test_prepared_weights_are_reported(layers: dict[int, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vllm.dsv4")
    for layer in layers.values():
        layer.process_weights_after_loading(torch.bfloat16)
    for _ in range(2):
        layers[0]._dsv4_host.report_weights()
    reports = [text for text in caplog.messages if "prepared" in text]
    count = len(STEPS)
    assert reports == [f"dsv4: layers built: {count}; weights that the backend prepared: 0 bytes."]


SIZES = [({"prepared_bytes": 3_000_000}, "12,000,000 bytes"), ({}, "not told")]


@pytest.mark.parametrize(("facts", "text"), SIZES)
def test_sizes_of_prepared_weights(
    layers: dict[int, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    facts: dict[str, int],
    text: str,
) -> None:
    from dsv4core.framework.binding import BoundLayer

    monkeypatch.setattr(BoundLayer, "describe", lambda self: facts)
    caplog.set_level("INFO", logger="vllm.dsv4")
    for layer in layers.values():
        layer.process_weights_after_loading(torch.bfloat16)
    layers[0]._dsv4_host.report_weights()
    assert (
        caplog.messages[-1]
        == f"dsv4: layers built: {len(layers)}; weights that the backend prepared: {text}."
    )


def test_roc_ms_output_is_rotated_back_where_its_projection_does_not(layers: dict[int, Any]) -> None:
    from vllm.forward_context import set_forward_context

    from dsv4core.model.rope import rope_table, rotate

    line = next(line for line in STEPS[0] if line["window"]["num_prefills"] == 0)
    layer = layers[0]
    windows, _ = expectation(line)
    layer.swa_cache_layer.kv_cache = Pool(
        line["window"], layer._dsv4_host.selection.layout.window, windows
    ).tensor
    layer.rotary_emb.cos_sin_cache = rope_table(layer._dsv4_host.choice.shape.rope, 64, 4096)
    q, positions = torch.randn(line["q"]).bfloat16(), tensor(line["positions"], torch.int64)
    outputs = []
    for weight in ("there", None):
        layer._wo_a_fp8_weight = weight
        set_forward_context(metadata(line))
        outputs.append(torch.empty_like(q))
        layer.forward_mqa(q, q, positions, outputs[-1])
    forward = rotate(outputs[1].float(), positions, layer.rotary_emb.cos_sin_cache)
    torch.testing.assert_close(forward, outputs[0].float(), atol=2e-2, rtol=2e-2)
    assert not torch.equal(outputs[0], outputs[1])


def test_a_layer_that_lost_an_attribute_is_refused(layers: dict[int, Any]) -> None:
    from dsv4_vllm.drift import DriftError

    del layers[0].kv_cache
    with pytest.raises(DriftError, match=r"a layer of DeepSeek-V4 has no kv_cache\. Install vLLM 0\.32"):
        layers[0].forward_mqa(None, None, None, None)


def test_block_tables_that_move_are_refused(layers: dict[int, Any]) -> None:
    from vllm.forward_context import set_forward_context

    from dsv4core.api import DSV4Error

    line = STEPS[0][-1]
    windows, _ = expectation(line)
    layers[0].swa_cache_layer.kv_cache = Pool(
        line["window"], layers[0]._dsv4_host.selection.layout.window, windows
    ).tensor
    kept = []
    q = torch.ones(line["q"], dtype=torch.bfloat16)

    def step() -> None:
        found = metadata(line)
        set_forward_context(found)
        kept.append(found["model.layers.0.attn.swa_cache"])
        kept[-1].block_table = kept[-1].block_table.clone()
        layers[0].forward_mqa(q, q, tensor(line["positions"], torch.int64), q)

    for _ in range(4):
        step()
    with pytest.raises(DSV4Error, match="block tables for layers of kind swa move between steps"):
        step()


def test_a_cache_of_plain_rows_is_refused(layers: dict[int, Any]) -> None:
    from vllm.forward_context import set_forward_context

    from dsv4core.api import ConfigError

    line = STEPS[0][0]
    set_forward_context(metadata(line))
    layers[0].swa_cache_layer.kv_cache = torch.zeros(4, 64, 512, dtype=torch.float8_e4m3fn)
    q = torch.ones(line["q"], dtype=torch.bfloat16)
    with pytest.raises(ConfigError) as caught:
        layers[0].forward_mqa(q, q, tensor(line["positions"], torch.int64), q)
    assert str(caught.value) == (
        "vLLM's cache has rows of 512 float8_e4m3fn, and fp8_ds_mla has 584 bytes; set kv_cache_dtype=fp8."
    )


def test_weights_are_prepared_when_vllm_prepares_its_own(layers: dict[int, Any]) -> None:
    layer = layers[0]
    assert layer._bound is None
    layer.process_weights_after_loading(torch.bfloat16)
    bound = layer._bound
    assert bound is not None
    layer.process_weights_after_loading(torch.bfloat16)
    assert layer._bound is not bound, "vLLM has loaded other weights"


PAGES = [
    (
        "context",
        "vLLM's pages stand for 512 tokens, and the backend was asked about 256; set block_size=256.",
    ),
    (
        "window",
        "vLLM's window pages have 512 rows, and the backend was asked about 64; this version of vLLM is not "
        "served.",
    ),
]


@pytest.mark.parametrize(("cache", "text"), PAGES)
def test_pages_of_another_size_are_refused(layers: dict[int, Any], cache: str, text: str) -> None:
    from vllm.forward_context import set_forward_context

    from dsv4core.api import DSV4Error

    line = STEPS[1][0]
    found = metadata(line)
    found[line["prefix"] if cache == "context" else "model.layers.1.attn.swa_cache"].block_size = 512
    set_forward_context(found)
    q = torch.ones(line["q"], dtype=torch.bfloat16)
    with pytest.raises(DSV4Error) as caught:
        layers[1].forward_mqa(q, q, tensor(line["positions"], torch.int64), q)
    assert str(caught.value) == text
