"""Record the metadata that vLLM hands to attention, for the tests that run without vLLM.

Pages are renumbered densely, so that a test's pools may be small; everything else is as vLLM gave it. What is
committed was made in the job's environment by

    DSV4_JOB_RECORD=steps python serve.py CHECKPOINT '{"dsv4": {"backend": "reference"}}' \\
        --lengths 5,300,140 --decode 3 --chunk 160
"""

from __future__ import annotations

import json
from typing import Any

import torch

from dsv4_vllm_job.around import Forward, around_attention

WINDOW = ("seq_lens", "query_start_loc", "token_to_req_indices", "block_table", "slot_mapping")
COUNTS = ("block_size", "num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens")


def install(path: str) -> None:
    """Record each call of the adapter's attention into `path` with the rank appended, a line each."""

    def recorded(base: Any, host: Any, ours: Forward) -> Forward:
        def forward_mqa(self: Any, q: Any, kv: Any, positions: Any, output: Any) -> None:
            _record(self, q, positions, f"{path}.{host.choice.rank}")
            ours(self, q, kv, positions, output)

        return forward_mqa

    around_attention("recorded", recorded)


def _record(layer: Any, q: Any, positions: Any, path: str) -> None:
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if metadata is None:
        return
    window, main = metadata[layer.swa_cache_layer.prefix], metadata.get(layer.prefix)
    tokens = window.num_decode_tokens + window.num_prefill_tokens
    line = {
        "prefix": layer.prefix,
        "ratio": layer.compress_ratio,
        "q": list(q.shape),
        "positions": positions.tolist(),
        "window": _group(window, layer.swa_cache_layer.kv_cache, WINDOW),
        "main": None if main is None else _group(main, layer.kv_cache, ("block_table", "slot_mapping")),
    }
    if layer.compress_ratio == 4:
        chosen = layer.topk_indices_buffer[:tokens].tolist()
        line["topk"] = [[entry for entry in row if entry >= 0] for row in chosen]  # the rest of 512 is -1
    with open(path, "a") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _group(metadata: Any, cache: torch.Tensor, tensors: tuple[str, ...]) -> dict[str, Any]:
    """One group of caches: its metadata with pages renumbered, and its cache's shape and page stride."""
    ratio = metadata.block_size // cache.shape[1]
    table = metadata.block_table
    pages = sorted(set(table.flatten().tolist()) | set(_pages(metadata.slot_mapping, cache.shape[1])))
    number = {page: index for index, page in enumerate(pages)}
    line: dict[str, Any] = {name: getattr(metadata, name).tolist() for name in tensors}
    line["block_table"] = [[number[page] for page in row] for row in table.tolist()]
    line["slot_mapping"] = [
        slot if slot < 0 else number[slot // cache.shape[1]] * cache.shape[1] + slot % cache.shape[1]
        for slot in metadata.slot_mapping.tolist()
    ]
    line |= {name: getattr(metadata, name) for name in COUNTS if hasattr(metadata, name)}
    line["cache"] = [len(pages), *cache.shape[1:]]
    line["page_stride"] = cache.stride(0)
    line["tokens_a_row"] = ratio
    return line


def _pages(slots: torch.Tensor, rows: int) -> list[int]:
    return [slot // rows for slot in slots.tolist() if slot >= 0]
