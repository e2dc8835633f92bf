"""A small checkpoint with made-up weights, in the official format: for tests, examples and the first run."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dsv4core.api import CheckpointError, ModelShape
from dsv4core.model.blocks import quantize_block
from dsv4core.model.files import INDEX
from dsv4core.model.names import EMBEDDING, layer_names, scale_names
from dsv4core.model.shapes import PRESETS, layer_kind, to_config
from dsv4core.model.tensors import QUANTISED, TensorSpec, layer_tensors

BLOCK = (128, 128)
QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}


def write_tiny_checkpoint(directory: str | Path, shape: ModelShape = PRESETS["tiny"], seed: int = 0) -> None:
    """Write an attention-only checkpoint of `shape` to `directory`: config.json, two shards and an index.

    Official names and dtypes: FP8 E4M3 weights with E8M0 scales of 128 x 128, BF16 norms, compressor
    projections and embedding, fp32 sinks and ape; draft layers as `mtp.N`. The same arguments give the same
    bytes. Scores spread by a few units, so attention is not uniform. The directory appears whole or not at
    all.

    Raises:
        CheckpointError: `directory` exists and is not empty.
        ConfigError: `shape` has no official spelling.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} is there already; remove it or name another directory.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = directory.parent / f".{directory.name}.{os.getpid()}"
    unfinished.mkdir()
    try:
        _write(unfinished, shape, seed)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(directory: Path, shape: ModelShape, seed: int) -> None:
    config = to_config(shape) | {"quantization_config": QUANTIZATION}
    generator = torch.Generator().manual_seed(seed)
    layers = range(len(shape.layer_kinds) + len(shape.draft_layer_kinds))
    middle = len(layers) // 2
    embedding = torch.empty(shape.vocab_size, shape.hidden_size).uniform_(-1.7, 1.7, generator=generator)
    first = {EMBEDDING[0]: embedding.bfloat16()}
    shards = (
        first | _layers(shape, layers[:middle], generator),
        _layers(shape, layers[middle:], generator),
    )
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(sorted(tensors), file)
    total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(directory / "config.json", config)


def _layers(shape: ModelShape, layers: range, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tensors = {}
    for index in layers:
        for name, spec in layer_tensors(shape, layer_kind(shape, index)).items():
            official = layer_names(shape, index, name)[0]
            values = _values(name, spec, generator)
            if spec.dtypes == QUANTISED:
                tensors[official], tensors[scale_names(official)[0]] = quantize_block(values, BLOCK)
            elif name.endswith(("attn_sink", "ape")):
                tensors[official] = values
            else:
                tensors[official] = values.bfloat16()
    return tensors


def _values(name: str, spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Uniform values, which unlike normal ones are the same on every CPU."""
    if name.endswith("ape"):
        low, high = -0.2, 0.2
    elif name == "attn_sink":
        low, high = -2.0, 2.0
    elif name == "kv_norm":
        # Unit q heads against unit keys score with deviation 1; longer keys make attention choose.
        low, high = 1.5, 2.5
    elif name.endswith("norm"):
        low, high = 0.5, 1.5
    else:
        high = math.sqrt(3 / spec.shape[1])
        low = -high
    return torch.empty(spec.shape).uniform_(low, high, generator=generator)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
