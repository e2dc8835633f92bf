"""What moved in vLLM is refused by name. CUDA and ROCm are held against recorded signatures only."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from dsv4_vllm import drift
from dsv4_vllm.drift import DriftError, Touched

from dsv4core.api import DSV4Error

RECORDED: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "recorded" / "signatures.json").read_text()
)


def recorded(touched: Touched) -> tuple[str, ...] | None:
    found = RECORDED.get(f"{touched.module}:{touched.name}")
    return None if found is None else tuple(found)


@pytest.mark.parametrize("touched", [drift.COMMON, drift.CPU, drift.CUDA, drift.ROCM])
def test_the_recorded_vllm_is_served(touched: tuple[Touched, ...]) -> None:
    drift.check(touched, recorded)


def test_every_touched_name_is_recorded() -> None:
    everything = (*drift.COMMON, *drift.CPU, *drift.CUDA, *drift.ROCM)
    assert {f"{one.module}:{one.name}" for one in everything} == set(RECORDED)


FORWARD = drift.CPU[0]
METADATA = next(one for one in drift.COMMON if one.name == "DeepseekSparseSWAMetadata")
MOVED = [
    (None, "vllm.models.deepseek_v4.cpu.cpu_sparse.DeepseekV4CPUAttention.forward_mqa is gone"),
    (
        ("self", "q", "positions", "output"),
        "vllm.models.deepseek_v4.cpu.cpu_sparse.DeepseekV4CPUAttention.forward_mqa takes (self, q, "
        "positions, output) and took (self, q, kv, positions, output)",
    ),
]
ADVICE = 'Install vLLM 0.32, a dsv4-vllm for your version, or take "dsv4" out of additional_config.'


@pytest.mark.parametrize(("found", "text"), MOVED)
def test_what_moved_is_named(found: tuple[str, ...] | None, text: str) -> None:
    with pytest.raises(DriftError) as caught:
        drift.check((FORWARD,), lambda touched: found)
    assert str(caught.value) == f"dsv4-vllm was made for vLLM 0.32, and in this one {text}. {ADVICE}"


def test_all_that_moved_is_named_at_once() -> None:
    without = tuple(name for name in METADATA.fields if name not in ("seq_lens", "block_size"))
    with pytest.raises(DriftError) as caught:
        drift.check((FORWARD, METADATA), lambda touched: None if touched is FORWARD else without)
    where = "vllm.v1.attention.backends.mla.sparse_swa.DeepseekSparseSWAMetadata"
    assert f"{MOVED[0][1]}; {where} has no block_size, seq_lens." in str(caught.value)


def test_more_fields_than_before_are_no_drift() -> None:
    drift.check((METADATA,), lambda touched: (*METADATA.fields, "replay_start"))


def test_installed_reads_what_is_there(vllm: None) -> None:
    for touched in (*drift.COMMON, *drift.CPU, *drift.CUDA, *drift.ROCM):
        found = drift.installed(touched)
        assert found is not None
        assert set(touched.parameters or touched.fields) <= set(found)
    assert drift.installed(replace(FORWARD, name="DeepseekV4CPUAttention.gone")) is None
    assert drift.installed(replace(FORWARD, module="vllm.gone")) is None


def test_drift_is_met_only_by_those_who_ask(vllm: None, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = import_module("vllm.models.deepseek_v4.cpu.cpu_sparse")
    monkeypatch.setattr(sparse.DeepseekV4CPUAttention, "forward_mqa", lambda self, q, positions: None)
    make_layer = import_module("vllm.models.deepseek_v4.cpu.model").make_layer
    make_layer(config(), "model.layers.0.attn")
    with pytest.raises(DSV4Error, match="forward_mqa takes"):
        make_layer(config({"backend": "reference"}), "model.layers.0.attn")
