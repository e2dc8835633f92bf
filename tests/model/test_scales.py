"""Scales of plain FP8 caches: a file of them, and those of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4core.api import CheckpointError, ConfigError, LayerScales, WeightError
from dsv4core.model.checkpoint import Checkpoint
from dsv4core.model.scales import read_scales, write_scales

SCALES = {0: LayerScales(0.5, 0.0375), 12: LayerScales(q=1.0, kv=3e-3)}


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    write_scales(tmp_path / "scales.json", SCALES)
    assert read_scales(tmp_path / "scales.json") == SCALES


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no file of scales (Expecting"),
        ("[]", "is no file of scales (list indices"),
        ('{"format": 2, "layers": {}}', "is of format 2, and 1 is read"),
        ('{"format": 1}', "is no file of scales ('layers')"),
        ('{"format": 1, "layers": {"0": {"q": 1}}}', "is no file of scales ('kv')"),
        (
            '{"format": 1, "layers": {"0": {"q": 0, "kv": 1}}}',
            "q=0.0 cannot be a scale; give a positive number",
        ),
    ],
)
def test_what_is_no_file_of_scales(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_scales(file)
    assert says in str(error.value)
    assert str(error.value).endswith("write it with `dsv4 calibrate`.")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1])
def test_what_is_no_scale(value: float) -> None:
    with pytest.raises(ValueError, match="cannot be a scale; give a positive number"):
        LayerScales(kv=value)


def with_scalars(checkpoint: str, folder: Path, **scalars: torch.Tensor) -> Checkpoint:
    """A copy of a checkpoint with more tensors."""
    copytree(checkpoint, folder)
    file = next(folder.glob("*.safetensors"))
    save_file({**load_file(file), **scalars}, file)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(scalars, file.name)
        index.write_text(json.dumps(content))
    return Checkpoint.open(folder)


@pytest.mark.parametrize("size", [(), (1,)])
def test_scales_of_a_checkpoint(size: tuple[int, ...], tiny_checkpoint: str, tmp_path: Path) -> None:
    scalars = {
        "layers.0.attn.kv_scale": torch.full(size, 0.25),
        "layers.1.attn.q_scale": torch.full(size, 2.0),
    }
    checkpoint = with_scalars(tiny_checkpoint, tmp_path / "own", **scalars)
    checkpoint.verify([0, 1])
    scales = [checkpoint.layer(index, max_positions=8).scales for index in range(3)]
    assert scales == [LayerScales(kv=0.25), LayerScales(q=2.0), LayerScales()]


def test_scales_that_cannot_be_used(tiny_checkpoint: str, tmp_path: Path) -> None:
    damaged = with_scalars(tiny_checkpoint, tmp_path / "a", **{"layers.0.attn.kv_scale": torch.tensor(0.0)})
    with pytest.raises(
        WeightError, match=r"The scales of layer 0: kv=0.0 cannot be a scale; .*; get it again"
    ):
        damaged.layer(0, max_positions=8)
    wide = with_scalars(tiny_checkpoint, tmp_path / "b", **{"layers.0.attn.kv_scale": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"layers.0.attn.kv_scale: found .*; expected BF16 or F32"):
        wide.verify([0])
