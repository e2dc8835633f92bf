"""From vLLM's metadata of a step to `dsv4core.api.Step`. Nothing is copied: tables and caches are vLLM's."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_vllm.host import Host
from dsv4core.api import CacheTable, ConfigError, KVCacheFormat, LayerKind, Step
from dsv4core.framework.binding import BoundKind
from dsv4core.kvcache import KVCache

MEMORY = "_dsv4_steps"


def step_of(
    host: Host, kind: LayerKind, window: Any, main: Any | None, positions: torch.Tensor, context: Any
) -> tuple[Step, BoundKind]:
    """This step as layers of `kind` see it, with their state, which is planned at the first of them.

    Args:
        host: The worker.
        kind: The layer's kind.
        window: vLLM's `DeepseekSparseSWAMetadata` of the layer's window cache.
        main: vLLM's `DeepseekV4FlashMLAMetadata` of its compressed cache, None without one.
        positions: `[tokens]` int64, padding of the batch included.
        context: vLLM's forward context. It is new in every step, and metadata need not be: drafts change it.
    """
    memory = context.__dict__.setdefault(MEMORY, {})
    key = (kind.name, id(window), id(main))
    if key not in memory:
        step = _translate(kind, window, main, positions, host)
        tables = (step.window, *step.compressed.values())
        bound = host.kind(kind, tuple(table.block_table.data_ptr() for table in tables))
        bound.prepare_step(step)
        bound.plan_step(step)
        memory[key] = (step, bound)
    found: tuple[Step, BoundKind] = memory[key]
    return found


def _translate(kind: LayerKind, window: Any, main: Any | None, positions: torch.Tensor, host: Host) -> Step:
    tokens = window.num_decode_tokens + window.num_prefill_tokens
    host.check_window_pages(window.block_size)
    if main is not None:
        host.check_context_pages(main.block_size)
    compressed = {}
    if kind.ratio is not None and main is not None:
        rows = main.block_size // kind.ratio
        compressed[kind.name] = CacheTable(main.block_table, main.slot_mapping, rows)
    return Step(
        positions=positions[:tokens],
        token_to_request=window.token_to_req_indices[:tokens],
        query_start_loc=window.query_start_loc,
        seq_lens=window.seq_lens,
        num_decode_requests=window.num_decodes,
        num_decode_tokens=window.num_decode_tokens,
        window=CacheTable(window.block_table, window.slot_mapping, window.block_size),
        compressed=compressed,
        state={},
        limits=host.request.limits,
    )


def cache_of(tensor: torch.Tensor, format: KVCacheFormat) -> KVCache:
    """A view of one of vLLM's caches.

    Args:
        tensor: `[pages, rows, bytes]` uint8; pages lie further apart than their rows take, because pages are
            aligned and several layers share an allocation.
        format: The packed format.

    Raises:
        ConfigError: It is not in that format.
    """
    pages, rows, width = tensor.shape
    if tensor.dtype != torch.uint8 or width != format.row_width:
        raise ConfigError(
            f"vLLM's cache has rows of {width} {str(tensor.dtype).removeprefix('torch.')}, and {format.name} "
            f"has {format.row_width} bytes; set kv_cache_dtype=fp8."
        )
    pool = tensor.as_strided((pages, rows, format.row_width), (tensor.stride(0), format.row_width, 1))
    return KVCache(pool, format)
