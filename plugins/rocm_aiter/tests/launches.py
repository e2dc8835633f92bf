"""What the backend launches besides AITER: its own kernels, and the core's on pools as it keeps them.

For `tests/triton/compile_kernels.py`, which compiles all other launches of the core for the same chips.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from compile_kernels import TOKENS, Chip
from dsv4_plugin_rocm_aiter import plugin
from dsv4_plugin_rocm_aiter.ragged import RaggedLists
from dsv4_plugin_rocm_aiter.ragged import triton as ragged

from dsv4core.api import C4A, C128A, CacheTable, Limits, Request, Step
from dsv4core.kvcache import allocate_cache
from dsv4core.model.shapes import PRESETS
from dsv4core.ops import triton as kernels
from dsv4core.ops.sparse_mla import Rows

MODEL = PRESETS["v4_flash"]
HEADS = MODEL.num_attention_heads


def calls(chip: Chip) -> Iterator[Any]:
    """Insert, attention, gathering, compressor and scores by the flavour of each pool; ragged lists."""
    limits = Limits(TOKENS, TOKENS, 4096, 1)
    positions, requests = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS, dtype=torch.int32)
    table, rope = CacheTable(torch.zeros(TOKENS, 64, dtype=torch.int32), positions, 64), torch.empty(4096, 64)
    q, kv = torch.empty(TOKENS, HEADS, 512).bfloat16(), torch.empty(TOKENS, 512).bfloat16()
    slots, sinks = torch.zeros(TOKENS, MODEL.index_topk, dtype=torch.int32), torch.empty(HEADS)
    for name in plugin.KV_FORMATS:
        request = Request("rocm", chip.target.arch, MODEL, HEADS, limits, kv_cache_dtype=name, probe="static")
        layout = plugin.dsv4_resolve_kv_cache(request)
        window, entries, keys = (
            allocate_cache(format, 2, 64) for format in (layout.window, layout.compressed, layout.index)
        )
        yield partial(kernels.qk_norm_rope_insert, q, kv, positions, rope, window, positions, 1e-6)
        attend = partial(kernels.sparse_mla, softmax_scale=MODEL.softmax_scale, sinks=sinks)
        own = Rows(window, slots[:, :128], requests)
        yield partial(attend, q, [own])
        yield partial(attend, q, [own, Rows(entries, slots, requests)])
        yield partial(attend, q, [own, Rows(entries, slots, requests, requests)], want_lse=True)
        workspace = torch.empty(TOKENS, 64, 512).bfloat16()
        for cache in (window, entries):
            yield partial(kernels.gather_rows, cache, table.block_table, positions, positions, workspace)
        for kind, width, target in ((C4A, 512, entries), (C4A, 128, keys), (C128A, 512, entries)):
            state = allocate_cache(layout.state.resized(kind.groups * width), 2, 64)
            tables = {kind.name: table}
            step = Step(*(positions, requests, requests, requests, 0, 0, table), tables, tables, limits)
            weights = (torch.empty(kind.ratio or 1, kind.groups * width), torch.empty(width).bfloat16(), rope)
            projected = torch.empty(TOKENS, 2 * kind.groups * width)
            yield partial(kernels.compress, projected, *weights, 1e-6, kind, step, state, target)
        codes = torch.empty(TOKENS, MODEL.index_n_heads, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
        weights_of = torch.empty(TOKENS, MODEL.index_n_heads)
        yield partial(kernels.index_logits, codes, weights_of, keys, table, requests, positions, 4096)
    yield from lists(slots, positions, requests)


def lists(slots: torch.Tensor, lengths: torch.Tensor, owners: torch.Tensor) -> Iterator[Any]:
    """Of windows, of entries that are chosen, of entries of whole requests, of gathered rows."""
    room = RaggedLists.empty(TOKENS, 8192, torch.device("cpu"))
    wide = torch.zeros(TOKENS, 8192, dtype=torch.int32)
    for least in (0, 1):
        yield partial(ragged.ragged_lists, slots[:, :128], lengths, None, least, room)
        yield partial(ragged.ragged_lists, slots, None, None, least, room)
        yield partial(ragged.ragged_lists, wide, lengths, owners, least, room)
