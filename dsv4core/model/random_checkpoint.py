"""A checkpoint with random weights in the official format: for tests, measurements and the first run."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dsv4core.api import CheckpointError, ModelShape, Weight
from dsv4core.model.blocks import quantize_block
from dsv4core.model.files import INDEX
from dsv4core.model.names import EMBEDDING, layer_names, scale_names
from dsv4core.model.shapes import PRESETS, layer_kind, to_config
from dsv4core.model.tensors import QUANTISED, TensorSpec, layer_tensors

FORMAT = 1
"""Changes whenever the same arguments would write other bytes."""

BLOCK = (128, 128)
QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}


def write_random_checkpoint(
    directory: str | Path,
    shape: ModelShape = PRESETS["tiny"],
    seed: int = 0,
    layers: Sequence[int] | None = None,
    track: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> None:
    """Write an attention-only checkpoint of `shape` to `directory`: config.json, two shards and an index.

    Official names and dtypes: FP8 E4M3 weights with E8M0 scales of 128 x 128, BF16 norms, compressor
    projections and embedding, fp32 sinks and ape; draft layers as `mtp.N`. The same arguments give the same
    bytes. Scores spread by a few units, so attention is not uniform. The directory appears whole or not at
    all.

    Args:
        directory: A new directory.
        shape: The model.
        seed: A layer's weights depend on it and on the layer's number only.
        layers: Layers to write; None writes all, draft layers included.
        track: Wraps the layers while they are written, to show progress.

    Raises:
        CheckpointError: `directory` exists and is not empty, cannot be written, or the disk is too full.
        ConfigError: `shape` has no official spelling.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} is there already; remove it or name another directory.")
    unfinished = directory.parent / f".{directory.name}.{os.getpid()}"
    try:
        unfinished.mkdir(parents=True)
        free, needed = shutil.disk_usage(unfinished).free, random_checkpoint_bytes(shape, layers)
        if free < needed:
            raise CheckpointError(
                f"{directory} would take {needed} bytes, and its disk has {free} free; make room or write "
                "fewer layers."
            )
        _write(unfinished, shape, seed, _all_layers(shape) if layers is None else layers, track)
        unfinished.rename(directory)
    except (OSError, SafetensorError) as error:
        if not any(directory.glob("config.json")):  # else another process was faster, with the same bytes
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(
                f"{directory} cannot be written: {reason}; choose another place (XDG_CACHE_HOME for dsv4 "
                "run)."
            ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def random_checkpoint_bytes(shape: ModelShape, layers: Sequence[int] | None = None) -> int:
    """Bytes of the tensors that `write_random_checkpoint` writes, scales excluded."""
    elements = sum(
        math.prod(spec.shape) * (1 if spec.dtypes == QUANTISED else 2)
        for index in (_all_layers(shape) if layers is None else layers)
        for spec in layer_tensors(shape, layer_kind(shape, index)).values()
    )
    return elements + 2 * shape.vocab_size * shape.hidden_size


def _all_layers(shape: ModelShape) -> range:
    return range(len(shape.layer_kinds) + len(shape.draft_layer_kinds))


def _write(
    directory: Path,
    shape: ModelShape,
    seed: int,
    layers: Sequence[int],
    track: Callable[[Iterable[int]], Iterable[int]],
) -> None:
    config = to_config(shape) | {"quantization_config": QUANTIZATION}
    generator = torch.Generator().manual_seed(seed)
    middle = len(layers) // 2
    embedding = torch.empty(shape.vocab_size, shape.hidden_size).uniform_(-1.7, 1.7, generator=generator)
    parts: tuple[dict[str, torch.Tensor], ...] = ({EMBEDDING[0]: embedding.bfloat16()}, {})
    weight_map: dict[str, str] = {}
    total = 0
    for number, (tensors, numbers) in enumerate(
        zip(parts, (layers[:middle], layers[middle:]), strict=True), 1
    ):
        for index in track(numbers):
            tensors |= _layer(shape, index, seed)
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(sorted(tensors), file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(directory / "config.json", config)


def random_layer(shape: ModelShape, index: int, seed: int = 0) -> dict[str, Weight]:
    """The whole weights of layer `index` by the names of `LayerWeights`, with `attn_norm`, on the CPU.

    They are those that `write_random_checkpoint` writes for the same arguments.
    """
    generator = torch.Generator().manual_seed((seed << 16) + index + 1)
    weights = {}
    for name, spec in layer_tensors(shape, layer_kind(shape, index)).items():
        values = _values(name, spec, generator)
        if spec.dtypes == QUANTISED:
            weights[name] = Weight(*quantize_block(values, BLOCK), BLOCK)
        else:
            weights[name] = Weight(values if name.endswith(("attn_sink", "ape")) else values.bfloat16())
    return weights


def _layer(shape: ModelShape, index: int, seed: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, weight in random_layer(shape, index, seed).items():
        official = layer_names(shape, index, name)[0]
        tensors[official] = weight.data
        if weight.scale is not None:
            tensors[scale_names(official)[0]] = weight.scale
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
