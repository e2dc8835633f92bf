"""`dsv4 calibrate`: scales for plain FP8 caches and queries, from the values that a prompt's tokens have.

The attention stack runs as in `dsv4 run`, without MLPs, with rows cached in the activation dtype. Of each
layer the largest query and the largest row are looked up.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import torch

from dsv4core.api import CheckpointError, ConfigError, LayerScales, Step
from dsv4core.cli.output import show_json, show_line
from dsv4core.cli.run import prepare
from dsv4core.config import DSV4Config
from dsv4core.kvcache import KVCache
from dsv4core.model.scales import write_scales
from dsv4core.stack import AttentionStack, StackedLayer

LARGEST = 448.0
"""Of E4M3."""
HEADROOM = 2.0
"""Times the largest value, which other prompts may reach before anything is cut off. It costs digits only of
what is below 2^-6 of the scale: codes are floating-point numbers."""


class Extremes:
    """The largest magnitudes of one layer."""

    def __init__(self) -> None:
        self.q = self.kv = 0.0

    def see_queries(self, q: torch.Tensor) -> None:
        """Enter queries, normalised and rotated."""
        self.q = _larger(self.q, q)

    def see_rows(self, cache: KVCache, slots: torch.Tensor) -> None:
        """Enter rows that a step has stored."""
        if bool((slots >= 0).any()):
            self.kv = _larger(self.kv, cache.read(slots[slots >= 0]))

    def scales(self) -> LayerScales:
        """The scales that leave the headroom; 1 where all values are zero.

        Raises:
            CheckpointError: A value is NaN or infinite.
        """
        if not math.isfinite(self.q + self.kv):
            raise CheckpointError("A query or a row is NaN or infinite; calibrate with dtype=float32.")
        return LayerScales(*(own * HEADROOM / LARGEST or 1.0 for own in (self.q, self.kv)))


def _larger(most: float, values: torch.Tensor) -> float:
    """The largest magnitude so far; NaN once there was one, which Python's `max` would drop."""
    found = float(values.float().abs().amax())
    return found if math.isnan(found) or found > most else most


def calibrate(config: DSV4Config, out: str | None) -> int:
    """Measure, write the file, and return the exit code.

    Raises:
        DSV4Error: The configuration, the checkpoint or the backend does not allow it.
    """
    if out is None:
        raise ConfigError("dsv4 calibrate writes a file of scales; name it with --out FILE.")
    if config.scales or config.verify or config.kv_cache_dtype != "auto":
        raise ConfigError(
            "dsv4 calibrate keeps rows in the activation dtype, without scales; leave out scales=, verify= "
            "and kv_cache_dtype=."
        )
    _check_writable(Path(out).expanduser())
    config.kv_cache_dtype = "bf16" if config.dtype == "bfloat16" else "fp32"
    job = prepare(config, lambda device: nullcontext)
    stack, batch = job.stack, config.batch
    if any(layer.scales != LayerScales() for layer in stack.layers):
        raise ConfigError("The checkpoint has scales of its own, which runs take; there is nothing to write.")
    extremes = {layer.spec.index: Extremes() for layer in stack.layers}
    for chunk, embedded in job.chunks():
        step, x = stack.plan([chunk.start] * batch, [chunk.tokens] * batch), embedded
        for layer in stack.layers:
            x = x + _attend(stack, layer, x, step, extremes[layer.spec.index])
    scales = {index: own.scales() for index, own in extremes.items()}
    write_scales(Path(out).expanduser(), scales)
    if config.json:
        show_json({str(index): vars(own) for index, own in scales.items()})
    else:
        show_line(f"Scales of {len(scales)} layers are in {out}; give it with scales={out}.")
    return 0


def _check_writable(file: Path) -> None:
    if not file.parent.is_dir() or file.is_dir():
        raise ConfigError(f"--out {file} cannot be written; name a file in a folder that is there.")


def _attend(
    stack: AttentionStack, layer: StackedLayer, x: torch.Tensor, step: Step, extremes: Extremes
) -> torch.Tensor:
    """What the layer adds to the residual stream, stage by stage."""
    attention, caches, state = layer.attention, stack.pools.layers[layer.spec.index], stack.kind_state(layer)
    projected = attention.project(stack.normalise(layer, x))
    q = attention.insert_kv(projected, caches, step)
    attention.compress(projected, caches, step)
    extremes.see_queries(q)
    extremes.see_rows(caches.window, step.window.slot_mapping)
    if caches.compressed is not None:
        extremes.see_rows(caches.compressed, step.compressed[layer.spec.kind.name].slot_mapping)
    selected = attention.select(projected, caches, step, state)
    return attention.o_proj(attention.attend(q, selected, caches, step, state), step)
