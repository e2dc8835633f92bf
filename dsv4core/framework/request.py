"""From a configuration to a request, and from there to a selection."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from dsv4core.api import ConfigError, Limits, ModelShape, PageSizes, Request
from dsv4core.api.selection import Probe, Seam
from dsv4core.config import AutoOptions, DSV4Config
from dsv4core.framework.platform import Machine
from dsv4core.framework.selection import Selection, select
from dsv4core.model.shapes import PRESETS, layer_spec, load_model_shape


def configured_shape(config: DSV4Config) -> ModelShape:
    """The sizes of the model: its checkpoint's, or a preset's.

    Raises:
        CheckpointError: The checkpoint has no readable `config.json`.
        ConfigError: It describes no model that is served here.
    """
    if config.checkpoint is not None:
        return load_model_shape(Path(config.checkpoint).expanduser())
    if config.model.name not in PRESETS:
        raise ConfigError(f"model={config.model.name} is not known; the names are {', '.join(PRESETS)}.")
    return PRESETS[config.model.name]


def build_limits(config: DSV4Config) -> Limits:
    """The largest step of a run: a chunk of the prompt for every request of the batch."""
    query = max(1, min(config.chunk, config.prefill))
    return Limits(
        max_tokens=config.batch * query,
        max_requests=config.batch,
        max_model_len=config.prefill + config.decode,
        max_query_len=query,
    )


def build_request(config: DSV4Config, shape: ModelShape, machine: Machine, probe: Probe) -> Request:
    """What a configuration asks of a backend.

    Args:
        config: The configuration.
        shape: The whole model's sizes.
        machine: The machine that is to compute.
        probe: How far a backend may look for its kernels.

    Raises:
        ConfigError: The heads or the output groups cannot be shared evenly.
    """
    asked = config.request
    return Request(
        platform=machine.platform,
        arch=machine.arch,
        model=shape,
        num_heads=layer_spec(shape, 0, tp_size=asked.tensor_parallel).num_heads,
        limits=build_limits(config),
        kv_cache_dtype=config.kv_cache_dtype,
        index_dtype=config.index_dtype,
        dtype=config.dtype,
        page_sizes=PageSizes(**vars(asked.page_sizes)),
        strided_pages=asked.strided_pages,
        decode_query_len=asked.decode_query_len,
        tensor_parallel=asked.tensor_parallel,
        context_parallel=asked.context_parallel,
        graph=asked.graph,
        private_output=asked.private_output,
        host_lengths=asked.host_lengths,
        deterministic=asked.deterministic,
        seam=cast(Seam, asked.seam),
        probe=probe,
    )


def select_configured(config: DSV4Config, request: Request) -> Selection:
    """Select the backend that a configuration names, or by its order.

    Raises:
        BackendUnavailable: The named backend cannot run the request, or none of the order can.
        ConfigError: The named backend does not accept an asked dtype.
    """
    disable = config.plugins.disable
    if isinstance(config.backend, AutoOptions):
        return select(request, order=config.backend.order, disable=disable)
    return select(request, config.backend.name, config.backend, disable=disable)
