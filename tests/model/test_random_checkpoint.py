"""The tiny checkpoint: same bytes, official format, whole or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dsv4core.model.random_checkpoint as module
from dsv4core.api import CheckpointError, ModelShape
from dsv4core.model.blocks import dequantize_block
from dsv4core.model.checkpoint import Checkpoint
from dsv4core.model.random_checkpoint import write_random_checkpoint
from dsv4core.model.shapes import PRESETS, load_model_shape


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_two_runs_write_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "again")
    assert digests(tmp_path / "again") == digests(tiny)
    assert list(digests(tiny)) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_seed_changes_values(small_shape: ModelShape, small_directory: Path, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "other", small_shape, seed=1)
    mine, other = digests(small_directory), digests(tmp_path / "other")
    assert mine["config.json"] == other["config.json"]
    assert mine["model-00001-of-00002.safetensors"] != other["model-00001-of-00002.safetensors"]


def test_official_format(tiny: Path) -> None:
    assert load_model_shape(tiny) == PRESETS["tiny"]
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        content = load_file(tiny / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == set(content)
        tensors |= content
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    dtypes = {name.removeprefix("layers.1.attn."): str(tensor.dtype)[6:] for name, tensor in tensors.items()}
    assert dtypes["wq_b.weight"] == "float8_e4m3fn"
    assert dtypes["wq_b.scale"] == "float8_e8m0fnu"
    assert dtypes["attn_sink"] == dtypes["compressor.ape"] == "float32"
    assert dtypes["kv_norm.weight"] == dtypes["indexer.compressor.wgate.weight"] == "bfloat16"
    assert dtypes["embed.weight"] == dtypes["layers.4.attn_norm.weight"] == "bfloat16"
    assert tuple(tensors["layers.1.attn.wo_a.scale"].shape) == (8, 8)
    assert "mtp.0.attn.wkv.weight" in tensors
    assert sum(file.stat().st_size for file in tiny.iterdir()) < 20e6


def test_scores_have_spread_and_sinks_count(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    weights = checkpoint.layer(0, max_positions=8)
    x = checkpoint.embedding(list(range(64))).float()

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = weights[name]
        assert weight.scale is not None
        assert weight.block is not None
        return x @ dequantize_block(weight.data, weight.scale, weight.block).T

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    x = rms(x) * checkpoint.attn_norm(0).float()
    q = rms(project(rms(project(x, "wq_a")) * weights["q_norm"].data.float(), "wq_b").view(64, 16, 512))
    kv = rms(project(x, "wkv")) * weights["kv_norm"].data.float()
    scores = torch.einsum("thd,sd->ths", q, kv) * PRESETS["tiny"].softmax_scale
    assert 1 < scores.std().item() < 4
    assert 0.5 < weights["attn_sink"].data.abs().mean().item() < 2
    ape = checkpoint.layer(1, max_positions=8)["compressor.ape"].data
    assert 0.05 < ape.abs().mean().item() < 0.2


def test_existing_directory_is_left_alone(small_shape: ModelShape, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(CheckpointError, match="is there already; remove it or name another directory"):
        write_random_checkpoint(tmp_path, small_shape)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_empty_directory_is_filled(small_shape: ModelShape, small_directory: Path, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, small_shape)
    assert digests(tmp_path) == digests(small_directory)


def test_interruption_leaves_nothing(
    small_shape: ModelShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path, content: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write_json", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_random_checkpoint(tmp_path / "cache" / "tiny", small_shape)
    assert list((tmp_path / "cache").iterdir()) == []
