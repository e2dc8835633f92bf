"""Each way in which a checkpoint can be wrong, and what its user reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4core.api import CheckpointError, ConfigError, WeightError
from dsv4core.model.checkpoint import Checkpoint


def lines_of(directory: Path, layers: list[int]) -> list[str]:
    """What `verify` reports, without the first line."""
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(directory).verify(layers)
    where = f"The checkpoint in {directory} cannot be used:"
    text = str(error.value)
    assert text.startswith(where)
    return [line.strip() for line in text.removeprefix(where).splitlines() if line.strip()]


def test_all_faults_in_one_error(small: Any, tmp_path: Path) -> None:
    tensors = small.tensors
    del tensors["layers.0.attn.wq_b.weight"]
    del tensors["layers.0.attn.wq_b.scale"]
    tensors["layers.0.attn.attn_sink"] = torch.zeros(5)
    del tensors["layers.1.attn.wkv.scale"]
    tensors["layers.1.attn.wo_a.scale"] = torch.ones(2, 2)
    tensors["layers.1.attn.compressor.wkv.weight"] = torch.zeros(256, 128, dtype=torch.float16)
    tensors["layers.2.attn.indexer.weights_proj.weight"] = torch.zeros(2, 128)
    tensors["layers.2.attn.kv_norm.scale"] = torch.ones(1)
    tensors["layers.2.attn.norm.weight"] = torch.ones(128)
    del tensors["layers.2.attn_norm.weight"]
    directory = small.save(tmp_path)
    assert lines_of(directory, [0, 1, 2]) == [
        "layers.0.attn.attn_sink: found F32 [5]; expected BF16 or F32 [4].",
        "layers.0.attn.wq_b.weight: not found; expected F8_E4M3 or BF16 or F32 [512, 64].",
        "layers.1.attn.wkv.scale: not found; expected F8_E8M0 or F32 [1, 1].",
        "layers.1.attn.wo_a.scale: found F32 [2, 2]; expected F8_E8M0 or F32 [1, 2].",
        "layers.1.attn.compressor.wkv.weight: found F16 [256, 128]; expected BF16 or F32 [256, 128].",
        "layers.2.attn_norm.weight: not found; expected BF16 or F32 [128].",
        "layers.2.attn.kv_norm.weight and layers.2.attn.norm.weight: both found; expected only one of these "
        "spellings.",
        "layers.2.attn.indexer.weights_proj.weight: found; expected none, as config.json makes the layer "
        "c128a.",
    ]
    assert len(lines_of(directory, [1])) == 3
    with pytest.raises(CheckpointError, match=r"layers\.1\.attn\.wkv\.scale: not found"):
        Checkpoint.open(directory).layer(1, max_positions=4)


def test_config_that_contradicts_the_weights(small: Any, tmp_path: Path) -> None:
    small.config["compress_ratios"] = [0, 0, 128]
    lines = lines_of(small.save(tmp_path), [1])
    assert len(lines) == 11
    assert lines[0] == (
        "layers.1.attn.compressor.ape: found; expected none, as config.json makes the layer swa."
    )


def test_scale_of_a_weight_that_is_not_fp8(small: Any, tmp_path: Path) -> None:
    small.tensors["layers.0.attn.wkv.weight"] = torch.zeros(128, 128)
    assert lines_of(small.save(tmp_path), [0]) == [
        "layers.0.attn.wkv.scale: found; expected none, as layers.0.attn.wkv.weight is F32."
    ]


def test_long_lists_are_capped(small: Any, tmp_path: Path) -> None:
    small.tensors = {"embed.weight": small.tensors["embed.weight"]}
    lines = lines_of(small.save(tmp_path), [0, 1, 2])
    assert len(lines) == 41  # all of them


@pytest.mark.parametrize(
    ("name", "value", "count"),
    [
        ("layers.1.attn.compressor.wgate.weight", float("nan"), 2),
        ("layers.1.attn.kv_norm.weight", float("inf"), 2),
        ("layers.1.attn.attn_sink", float("-inf"), 2),
        ("layers.1.attn.wkv.weight", float("nan"), 2),
        ("layers.1.attn.wkv.scale", float("nan"), 1),
    ],
)
def test_bad_values_are_counted(small: Any, tmp_path: Path, name: str, value: float, count: int) -> None:
    tensor = small.tensors[name].clone()
    tensor.flatten()[:count] = value
    small.tensors[name] = tensor
    checkpoint = Checkpoint.open(small.save(tmp_path))
    checkpoint.verify([1])
    with pytest.raises(WeightError) as error:
        checkpoint.layer(1, max_positions=4)
    assert str(error.value) == (
        f"{name} holds {count} NaN or infinite values; the checkpoint is damaged, so get it again."
    )


def test_bad_values_in_norm_and_embedding(small: Any, tmp_path: Path) -> None:
    small.tensors["layers.0.attn_norm.weight"][3] = float("nan")
    small.tensors["embed.weight"][5, :3] = float("inf")
    checkpoint = Checkpoint.open(small.save(tmp_path))
    with pytest.raises(WeightError, match=r"layers\.0\.attn_norm\.weight holds 1 NaN"):
        checkpoint.attn_norm(0)
    assert checkpoint.embedding([4]).isfinite().all()
    with pytest.raises(WeightError, match=r"embed\.weight holds 3 NaN"):
        checkpoint.embedding([4, 5])


def test_embedding_that_does_not_fit(small: Any, tmp_path: Path) -> None:
    small.config["vocab_size"] = 40
    with pytest.raises(
        CheckpointError, match=r"embed\.weight: found BF16 \[32, 128\]; expected BF16 or F32 \[40"
    ):
        Checkpoint.open(small.save(tmp_path)).embedding([0])


def test_directories_without_a_checkpoint(small: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="file is not a directory; give the one that holds"):
        Checkpoint.open(file)
    with pytest.raises(CheckpointError, match=r"has no config\.json; give the directory"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(small.config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(
        CheckpointError, match=r"has no \.safetensors files; \.bin files are not read, so conv"
    ):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(small.config | {"attention_bias": True}))
    with pytest.raises(ConfigError, match="attention_bias is true"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_file_cut_short(small: Any, tmp_path: Path, keep: int) -> None:
    file = small.save(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    header = 8 + int.from_bytes(content[: min(8, keep % len(content))], "little")
    expected = len(content) if keep < 0 else f"at least {header}"
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(tmp_path)
    assert f"{file} has {len(content[:keep])} bytes, but its header says {expected}; " in str(error.value)
    assert str(error.value).endswith("download it again.")


def test_files_that_are_not_safetensors(small: Any, tmp_path: Path) -> None:
    file = small.save(tmp_path) / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(
        CheckpointError, match=r"it is cut short or no safetensors file \(a Git LFS pointer\?\)"
    ):
        Checkpoint.open(tmp_path)
    file.write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(CheckpointError, match="has no readable safetensors header; download it again"):
        Checkpoint.open(tmp_path)


def test_index_that_cannot_be_followed(small_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(small_directory, tmp_path, dirs_exist_ok=True)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    second = "model-00002-of-00002.safetensors"
    weight_map["layers.0.attn.wkv.weight"] = second
    weight_map["layers.0.attn.wkv.scale"] = "model-00003-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert lines_of(tmp_path, [0]) == [
        f"model.safetensors.index.json puts layers.0.attn.wkv.weight into {second}, but it is not there; "
        "download both again."
    ]
    content = load_file(tmp_path / second)
    weights = load_file(tmp_path / "model-00001-of-00002.safetensors")
    save_file(content | {"layers.0.attn.wkv.weight": weights["layers.0.attn.wkv.weight"]}, tmp_path / second)
    assert lines_of(tmp_path, [0]) == [
        f"{tmp_path}/model-00003-of-00002.safetensors is missing; download it."
    ]
    for text in ("{", "[]", "{}", '{"weight_map": 1}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match="is no JSON object with a weight_map from tensor to file"):
            Checkpoint.open(tmp_path)


def test_two_files_with_one_tensor(small: Any, tmp_path: Path) -> None:
    shutil.copy(small.save(tmp_path) / "model.safetensors", tmp_path / "model0-mp2.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors and model0-mp2\.safetensors in .* both hold"
    ):
        Checkpoint.open(tmp_path)
