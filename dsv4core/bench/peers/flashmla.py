"""FlashMLA's sparse decode."""

from __future__ import annotations

from typing import Any

import torch

from dsv4core.bench.gaps import Unmeasurable
from dsv4core.bench.inputs import Inputs, Turn
from dsv4core.bench.operations import Measured
from dsv4core.bench.peers.slots import attended_slots
from dsv4core.bench.timing import Call


def attention(inputs: Inputs) -> Measured:
    """Decode on packed rows, every query a row of its batch.

    Its schedule, which layers of a kind share in a step, is made by the first call: lengths do not change.
    """
    heads, read = inputs.spec.num_heads, inputs.selection.layout.window.name
    if read != "fp8_ds_mla" or heads > 128 or inputs.workload.phase != "decode":
        raise Unmeasurable(
            f"FlashMLA decodes up to 128 heads on fp8_ds_mla rows, and this is {inputs.workload.phase} of "
            f"{heads} heads on {read} rows; set bench.phase=[decode] and kv_cache_dtype=fp8_ds_mla."
        )
    import flash_mla

    padded = 64 if heads <= 64 else 128
    legacy = {"use_legacy": True, "kv_format": "V4"} if hasattr(flash_mla, "has_legacy") else {}
    sinks = torch.full((padded,), float("-inf"), device=inputs.device)
    sinks[:heads] = 0

    def one(turn: Turn) -> Call:
        q = torch.nn.functional.pad(turn.q[:, :heads], (0, 0, 0, padded - heads)).to(torch.bfloat16)[:, None]
        attended = attended_slots(inputs, turn)
        pools = [(cache.pool[:, :, None], _padded(slots, padded)) for cache, slots in attended]
        lengths = [(slots >= 0).sum(-1, dtype=torch.int32) for _, slots in attended]
        (cache, indices), *more = pools
        extra: dict[str, Any] = {}
        if more:
            extra = {
                "extra_k_cache": more[0][0],
                "extra_indices_in_kvcache": more[0][1],
                "extra_topk_length": lengths[1],
            }

        metadata, _ = flash_mla.get_mla_metadata()

        def call() -> object:
            return flash_mla.flash_mla_with_kvcache(
                q=q,
                k_cache=cache,
                block_table=None,
                cache_seqlens=None,
                head_dim_v=512,
                tile_scheduler_metadata=metadata,
                softmax_scale=inputs.spec.model.softmax_scale,
                is_fp8_kvcache=True,
                indices=indices,
                attn_sink=sinks,
                topk_length=lengths[0],
                **extra,
                **legacy,
            )

        return call

    calls = [one(turn) for turn in inputs.turns("forward_mqa")]
    return Measured("forward_mqa", calls, inputs.selection.layout)


def _padded(slots: torch.Tensor, heads: int) -> torch.Tensor:
    """`[tokens, 1, width]`, as wide as the kernel wants it."""
    multiple = 64 if heads == 64 else 128
    slots = torch.nn.functional.pad(slots, (0, -slots.shape[1] % multiple), value=-1)
    return slots[:, None].contiguous()
