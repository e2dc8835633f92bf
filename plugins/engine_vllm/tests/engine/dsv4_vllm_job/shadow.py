"""Beside each attention of ours, vLLM's own on the same caches; their difference goes into a file."""

from __future__ import annotations

import json
from typing import Any

from dsv4_vllm_job.around import Forward, around_attention


def install(path: str) -> None:
    """Wrap the classes that the adapter makes.

    Args:
        path: Where each call adds a line; the rank is appended.
    """

    def shadowed(base: Any, host: Any, ours: Forward) -> Forward:
        def forward_mqa(self: Any, q: Any, kv: Any, positions: Any, output: Any) -> None:
            ours(self, q, kv, positions, output)
            _compare(self, base, q, kv, positions, output, f"{path}.{host.choice.rank}")

        return forward_mqa

    around_attention("shadowed", shadowed)


def largest_error(found: Any, expected: Any) -> float:
    """The largest relative error of a head's output for one token; NaN where anything is.

    A row that is a thousand times smaller than the largest counts as that large.
    """
    norm = expected.norm(dim=-1)
    return float(((found - expected).norm(dim=-1) / norm.clamp_min(1e-3 * norm.max())).max())


def _compare(layer: Any, base: Any, q: Any, kv: Any, positions: Any, output: Any, path: str) -> None:
    import torch
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if metadata is None:
        return
    window = metadata[layer.swa_cache_layer.prefix]
    tokens = window.num_decode_tokens + window.num_prefill_tokens
    expected = torch.zeros_like(output)
    base.forward_mqa(layer, q, kv, positions, expected)
    mine, theirs = output[:tokens].float(), expected[:tokens].float()
    line = {
        "layer": layer.prefix,
        "ratio": layer.compress_ratio,
        "tokens": tokens,
        "decodes": window.num_decodes,
        "prefills": window.num_prefills,
        "longest": int(window.seq_lens.max()),
        "error": largest_error(mine, theirs),
    }
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")
