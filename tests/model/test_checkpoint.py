"""Loading: values, tensor-parallel shards, and reading only what is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dsv4core.model.files as files_module
from dsv4core.api import CheckpointError, ConfigError
from dsv4core.model.blocks import dequantize_block, quantize_block
from dsv4core.model.checkpoint import Checkpoint
from dsv4core.model.rope import rope_table
from dsv4core.model.shapes import PRESETS

ATTENTION = {"attn_sink", "wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b"}
COMPRESSOR = {"ape", "wkv", "wgate", "norm"}
INDEXER = {
    *("indexer.wq_b", "indexer.weights_proj"),
    *(f"indexer.compressor.{name}" for name in COMPRESSOR),
}
BLOCK = (128, 128)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert one.dtype == other.dtype
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_layers_have_the_tensors_of_their_kind(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    assert checkpoint.shape == PRESETS["tiny"]
    assert checkpoint.vocab_size == 512
    checkpoint.verify(range(6))
    main = {f"compressor.{name}" for name in COMPRESSOR}
    expected = [ATTENTION, ATTENTION | main | INDEXER, ATTENTION | main]
    for index, names in enumerate([*expected, expected[1], ATTENTION, ATTENTION]):
        assert set(checkpoint.layer(index, max_positions=4).tensors) == names


def test_values_are_those_of_the_file(tiny: Path, whole: Callable[[str], torch.Tensor]) -> None:
    weights = Checkpoint.open(tiny).layer(1, max_positions=4)
    for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b"):
        weight = weights[name]
        assert weight.scale is not None
        assert weight.block == BLOCK
        assert same_bits(weight.data, whole(f"layers.1.attn.{name}.weight"))
        assert same_bits(weight.scale, whole(f"layers.1.attn.{name}.scale"))
    for name in ("q_norm", "kv_norm", "compressor.wkv", "compressor.wgate", "indexer.weights_proj"):
        assert same_bits(weights[name].data, whole(f"layers.1.attn.{name}.weight"))
        assert weights[name].scale is None
    for name in ("attn_sink", "compressor.ape", "indexer.compressor.ape"):
        assert same_bits(weights[name].data, whole(f"layers.1.attn.{name}"))


def test_dequantised_weights_are_the_originals_within_fp8(small: Any, tmp_path: Path) -> None:
    original = torch.randn(128, 128, generator=torch.Generator().manual_seed(5))
    data, scale = quantize_block(original)
    small.tensors |= {"layers.0.attn.wkv.weight": data, "layers.0.attn.wkv.scale": scale}
    weight = Checkpoint.open(small.save(tmp_path)).layer(0, max_positions=4)["wkv"]
    assert weight.scale is not None
    error = (dequantize_block(weight.data, weight.scale, BLOCK) - original).abs()
    assert (error <= original.abs() / 16 + scale.float() * 2**-10).all()


def test_draft_layer(tiny: Path, whole: Callable[[str], torch.Tensor]) -> None:
    checkpoint = Checkpoint.open(tiny)
    assert same_bits(checkpoint.layer(5, max_positions=4)["wkv"].data, whole("mtp.0.attn.wkv.weight"))
    assert torch.equal(checkpoint.attn_norm(5), whole("mtp.0.attn_norm.weight"))
    with pytest.raises(CheckpointError, match=r"mtp\.1\.attn\.wq_a\.weight: not found; expected F8_E4M3 or"):
        checkpoint.layer(6, max_positions=4)


def test_rope_tables_are_shared_by_class(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    ropes = [checkpoint.layer(index, max_positions=9).rope for index in range(6)]
    assert ropes[1] is ropes[2] is ropes[3]
    assert ropes[0] is ropes[4] is ropes[5]
    assert ropes[0] is rope_table(PRESETS["tiny"].rope, 64, 9)
    assert ropes[1] is rope_table(PRESETS["tiny"].compress_rope, 64, 9)


@pytest.mark.parametrize("tp_size", [2, 8])
def test_shards_make_the_whole(tiny: Path, tp_size: int) -> None:
    checkpoint = Checkpoint.open(tiny)
    alone = checkpoint.layer(1, max_positions=4)
    ranks = [checkpoint.layer(1, rank, tp_size, max_positions=4) for rank in range(tp_size)]
    split = {"attn_sink": 0, "wq_b": 0, "wo_a": 0, "wo_b": 1}
    for name, weight in alone.tensors.items():
        parts = [rank[name] for rank in ranks]
        if name not in split:
            assert all(same_bits(part.data, weight.data) for part in parts)
            continue
        dim = split[name]
        assert parts[0].data.shape[dim] * tp_size == weight.data.shape[dim]
        assert all(part.data.is_contiguous() for part in parts)
        assert same_bits(torch.cat([part.data for part in parts], dim), weight.data)
        if weight.scale is not None:
            scales = [part.scale.view(torch.uint8) for part in parts if part.scale is not None]
            assert torch.equal(torch.cat(scales, dim), weight.scale.view(torch.uint8))


def test_shards_that_cut_blocks_are_refused(small_directory: Path) -> None:
    checkpoint = Checkpoint.open(small_directory)
    with pytest.raises(ConfigError) as error:
        checkpoint.layer(0, 1, 2, max_positions=4)
    assert str(error.value) == (
        "A tensor-parallel size of 2 gives each rank 64 rows of layers.0.attn.wo_a.weight, which cuts its "
        "scale blocks of 128; use fewer ranks."
    )
    with pytest.raises(ConfigError, match="does not divide num_attention_heads"):
        checkpoint.layer(0, 0, 3, max_positions=4)


def test_only_needed_files_and_rows_are_read(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    headers: list[str] = []
    read: list[tuple[str, tuple[slice, ...]]] = []
    safe_open, read_header = files_module.safe_open, files_module._read_header
    plain_read = files_module.TensorFiles.read

    def spy_open(path: Path, **options: Any) -> Any:
        opened.append(path.name)
        return safe_open(path, **options)

    def spy_header(path: Path) -> Any:
        headers.append(path.name)
        return read_header(path)

    def spy_read(self: Any, name: str, *index: slice) -> torch.Tensor:
        read.append((name, index))
        return plain_read(self, name, *index)

    monkeypatch.setattr(files_module, "safe_open", spy_open)
    monkeypatch.setattr(files_module, "_read_header", spy_header)
    monkeypatch.setattr(files_module.TensorFiles, "read", spy_read)

    checkpoint = Checkpoint.open(tiny)
    assert (headers, opened) == ([], [])
    checkpoint.verify([0, 1])
    assert (headers, opened) == (["model-00001-of-00002.safetensors"], [])
    checkpoint.layer(1, 3, 8, max_positions=4)
    assert opened == ["model-00001-of-00002.safetensors"]
    assert all(name.startswith("layers.1.attn.") for name, _ in read)
    parts = dict(read)
    assert parts["layers.1.attn.wq_b.weight"] == (slice(3072, 4096), slice(None))
    assert parts["layers.1.attn.wq_b.scale"] == (slice(24, 32), slice(None))
    assert parts["layers.1.attn.wo_b.weight"] == (slice(None), slice(384, 512))
    assert parts["layers.1.attn.wo_b.scale"] == (slice(None), slice(3, 4))
    read.clear()
    checkpoint.embedding([300, 7, 300])
    assert sum(index[0].stop - index[0].start for _, index in read) == 2
    assert headers == opened == ["model-00001-of-00002.safetensors"]


def test_a_shard_that_is_not_needed_may_be_absent(tiny: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).symlink_to(tiny / name)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.layer(2, max_positions=4)
    with pytest.raises(CheckpointError) as error:
        checkpoint.verify([2, 3, 4])
    missing = f"{tmp_path}/model-00002-of-00002.safetensors is missing; download it."
    assert str(error.value) == f"The checkpoint in {tmp_path} cannot be used: {missing}"


def test_embedding_and_norm(tiny: Path, whole: Callable[[str], torch.Tensor]) -> None:
    checkpoint = Checkpoint.open(tiny)
    tokens = [511, 0, 3, 3, 0]
    assert torch.equal(checkpoint.embedding(tokens), whole("embed.weight")[tokens])
    assert torch.equal(checkpoint.embedding(torch.tensor([3])), whole("embed.weight")[3:4])
    assert checkpoint.embedding([]).shape == (0, 256)
    assert torch.equal(checkpoint.attn_norm(2), whole("layers.2.attn_norm.weight"))
    with pytest.raises(ConfigError, match="Token 512 is outside the vocabulary of 512; tokenise for this"):
        checkpoint.embedding([1, 512])
    with pytest.raises(ConfigError, match="Token -1 is outside the vocabulary"):
        checkpoint.embedding([-1])


def test_weights_do_not_follow_the_file(small: Any, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(small.save(tmp_path))
    before = checkpoint.layer(0, max_positions=4)["wkv"].data
    copy = before.clone()
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    assert same_bits(before, copy)


def test_bf16_fp32_and_other_spellings_load_alike(small: Any, tmp_path: Path) -> None:
    scale = small.tensors.pop("layers.1.attn.wkv.scale").float()
    small.tensors["layers.1.attn.wkv.weight_scale_inv"] = scale
    dense = dequantize_block(
        small.tensors["layers.1.attn.wq_a.weight"], small.tensors.pop("layers.1.attn.wq_a.scale"), BLOCK
    )
    small.tensors["layers.1.attn.wq_a.weight"] = dense.bfloat16()
    small.tensors["layers.1.attn.attn_sink"] = small.tensors["layers.1.attn.attn_sink"].bfloat16()
    weights = Checkpoint.open(small.save(tmp_path)).layer(1, max_positions=4)
    assert weights["wkv"].scale is not None
    assert torch.equal(weights["wkv"].scale, scale)
    assert (weights["wq_a"].scale, weights["wq_a"].block) == (None, None)
    assert torch.equal(weights["wq_a"].data, dense.bfloat16())
    assert weights["attn_sink"].data.dtype == torch.float32


def test_blocks_of_another_size(small: Any, tmp_path: Path) -> None:
    small.config["quantization_config"]["weight_block_size"] = [64, 32]
    for name in [name for name in small.tensors if name.endswith(".scale")]:
        weight = name.replace(".scale", ".weight")
        dense = dequantize_block(small.tensors[weight], small.tensors[name], BLOCK)
        small.tensors[weight], small.tensors[name] = quantize_block(dense, (64, 32))
    checkpoint = Checkpoint.open(small.save(tmp_path))
    weight = checkpoint.layer(0, 1, 2, max_positions=4)["wo_a"]
    assert weight.scale is not None
    assert (weight.block, weight.data.shape, weight.scale.shape) == ((64, 32), (64, 256), (1, 8))


def test_files_without_an_index(small: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small.config))
    names = sorted(small.tensors)
    for number in (0, 1):
        part = {name: small.tensors[name] for name in names[number::2]}
        save_file(part, tmp_path / f"part{number}.safetensors")
    weights = Checkpoint.open(tmp_path).layer(1, max_positions=4)
    assert same_bits(weights["wo_b"].data, small.tensors["layers.1.attn.wo_b.weight"])


def test_a_weight_on_the_meta_device(tiny: Path) -> None:
    weights = Checkpoint.open(tiny).layer(0, max_positions=4, device="meta")
    assert weights.rope.device.type == weights["wq_b"].data.device.type == "meta"
    assert weights["wq_b"].scale is not None
    assert weights["wq_b"].scale.device.type == "meta"
