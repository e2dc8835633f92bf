"""From a configuration to a request, and from there to a selection."""

from __future__ import annotations

from dsv4core.api import Limits, ModelShape, Request
from dsv4core.api.selection import Platform, Probe
from dsv4core.config import AutoOptions, DSV4Config
from dsv4core.framework.selection import Selection, select
from dsv4core.model.shapes import layer_spec


def build_limits(config: DSV4Config) -> Limits:
    """The largest step of a run: a chunk of the prompt for every request of the batch."""
    query = max(1, min(config.chunk, config.prefill))
    return Limits(
        max_tokens=config.batch * query,
        max_requests=config.batch,
        max_model_len=config.prefill + config.decode,
        max_query_len=query,
    )


def build_request(
    config: DSV4Config,
    shape: ModelShape,
    limits: Limits,
    platform: Platform,
    arch: str,
    tensor_parallel: int = 1,
    probe: Probe = "host",
) -> Request:
    """What a configuration asks of a backend.

    Args:
        config: The configuration.
        shape: The whole model's sizes.
        limits: The largest step.
        platform: `cpu`, `cuda` or `rocm`.
        arch: `sm_90`, `gfx942`, …; empty on a CPU.
        tensor_parallel: Ranks that share the heads.
        probe: How far a backend may look for its kernels.

    Raises:
        ConfigError: The heads or the output groups cannot be shared evenly.
    """
    return Request(
        platform=platform,
        arch=arch,
        model=shape,
        num_heads=layer_spec(shape, 0, tp_size=tensor_parallel).num_heads,
        limits=limits,
        kv_cache_dtype=config.kv_cache_dtype,
        index_dtype=config.index_dtype,
        dtype=config.dtype,
        tensor_parallel=tensor_parallel,
        probe=probe,
    )


def select_configured(config: DSV4Config, request: Request) -> Selection:
    """Select the backend that a configuration names, or by its order.

    Raises:
        SelectionError: The named backend cannot run the request, or none of the order can.
        ConfigError: The named backend does not accept an asked dtype.
    """
    if isinstance(config.backend, AutoOptions):
        return select(request, order=config.backend.order, exclude=config.backend.exclude)
    return select(request, config.backend.name, config.backend)
