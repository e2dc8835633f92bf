"""Checkpoints for the tests: the tiny preset, and a smaller one whose content a test may spoil."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4core.api import C4A, C128A, SWA, ModelShape, RopeParameters, YarnParameters
from dsv4core.model.random_checkpoint import write_random_checkpoint
from dsv4core.model.shapes import PRESETS

SMALL = replace(
    PRESETS["tiny"],
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    head_dim=128,
    q_lora_rank=64,
    o_groups=2,
    o_lora_rank=64,
    index_n_heads=2,
    index_topk=8,
    vocab_size=32,
    max_position_embeddings=1024,
    layer_kinds=(SWA, C4A, C128A),
    draft_layer_kinds=(),
    compress_rope=RopeParameters(theta=160000.0, yarn=YarnParameters(4.0, 256)),
)


@dataclass
class Content:
    """A checkpoint in memory."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def save(self, directory: Path) -> Path:
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, directory / "model.safetensors")
        return directory


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_random_checkpoint(directory)
    return directory


@pytest.fixture(scope="session")
def small_shape() -> ModelShape:
    return SMALL


@pytest.fixture(scope="session")
def small_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "small"
    write_random_checkpoint(directory, SMALL)
    return directory


@pytest.fixture
def small(small_directory: Path) -> Content:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(small_directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return Content(json.loads((small_directory / "config.json").read_text()), tensors)


@pytest.fixture
def whole(tiny: Path) -> Callable[[str], torch.Tensor]:
    """Reads a tensor of the tiny checkpoint with safetensors alone."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(tiny.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors.__getitem__
