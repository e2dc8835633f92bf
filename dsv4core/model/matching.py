"""Which stored tensor is which weight of a layer, and what is wrong with those that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4core.api import CheckpointError, ModelShape
from dsv4core.model.files import TensorFiles
from dsv4core.model.names import (
    ATTENTION_SCOPES,
    SCALARS,
    layer_names,
    layer_prefixes,
    scalar_names,
    scale_names,
)
from dsv4core.model.shapes import layer_kind
from dsv4core.model.tensors import FP8, SCALE, TensorSpec, layer_tensors


@dataclass(frozen=True)
class Match:
    """A stored tensor that fits.

    Attributes:
        data: Its name in the checkpoint.
        scale: Name of its scale, None where it is not FP8.
        spec: What it was checked against.
    """

    data: str
    scale: str | None
    spec: TensorSpec


def match_layer(
    files: TensorFiles, shape: ModelShape, index: int, block: tuple[int, int]
) -> tuple[dict[str, Match], list[str]]:
    """The tensors of layer `index` that fit, by our name, and a line for each thing that does not."""
    kind = layer_kind(shape, index)
    matches: dict[str, Match] = {}
    problems: list[str] = []
    known = {spelling for name in SCALARS for spelling in scalar_names(shape, index, name)}
    for name, spec in layer_tensors(shape, kind).items():
        names = layer_names(shape, index, name)
        known.update(names, *(scale_names(spelling) for spelling in names))
        match, lines = match_tensor(files, names, spec, block)
        problems += lines
        if match is not None:
            matches[name] = match
    for scope in (prefix + scope for prefix in layer_prefixes(shape, index) for scope in ATTENTION_SCOPES):
        for name in files.below(scope):
            if name not in known:
                problems.append(f"{name}: found; expected none, as config.json makes the layer {kind.name}.")
    return matches, problems


def match_scalars(files: TensorFiles, shape: ModelShape, index: int) -> tuple[dict[str, str], list[str]]:
    """Names of the scales that layer `index` has, by ours, and a line for each that does not fit."""
    matches: dict[str, str] = {}
    problems: list[str] = []
    for name in SCALARS:
        present = [spelling for spelling in scalar_names(shape, index, name) if spelling in files]
        sizes = {1: TensorSpec((1,)), 0: TensorSpec(())}
        if present:
            size = sizes.get(len(files[present[0]].shape), sizes[0])
            found, lines = _stored_name(files, present, size)
            problems += lines
            matches |= {} if found is None else {name: found}
    return matches, problems


def match_tensor(
    files: TensorFiles, names: Sequence[str], spec: TensorSpec, block: tuple[int, int]
) -> tuple[Match | None, list[str]]:
    """The tensor that lies under one of its `names`, with its scale where it is FP8; else None and why."""
    data, problems = _stored_name(files, names, spec)
    if data is None:
        return None, problems
    if files[data].dtype != FP8:
        scales = [name for name in scale_names(data) if name in files]
        lines = [f"{name}: found; expected none, as {data} is {files[data].dtype}." for name in scales]
        return Match(data, None, spec), lines
    blocks = tuple(-(-size // step) for size, step in zip(spec.shape, block, strict=True))
    scale, problems = _stored_name(files, scale_names(data), TensorSpec(blocks, SCALE))
    return (None if scale is None else Match(data, scale, spec)), problems


def _stored_name(files: TensorFiles, names: Sequence[str], spec: TensorSpec) -> tuple[str | None, list[str]]:
    present = [name for name in names if name in files]
    if not present:
        return None, [f"{names[0]}: not found; expected {spec}."]
    if len(present) > 1:
        return None, [f"{' and '.join(present)}: both found; expected only one of these spellings."]
    try:
        found = files[present[0]]
    except CheckpointError as error:
        return None, [str(error)]
    if found.dtype not in spec.dtypes or found.shape != spec.shape:
        return None, [f"{present[0]}: found {found}; expected {spec}."]
    return present[0], []
