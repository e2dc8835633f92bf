"""torch's own operations, as a user of torch would write attention and projection."""

from __future__ import annotations

from functools import partial

import torch

from dsv4core.bench.gaps import Unmeasurable
from dsv4core.bench.inputs import Inputs
from dsv4core.bench.operations import Measured
from dsv4core.bench.peers.slots import attended_slots
from dsv4core.kvcache import KVCache
from dsv4core.model.blocks import dequantize_block
from dsv4core.model.rope import rotate_back


def attention(inputs: Inputs) -> Measured:
    """Gather, decode, two products."""
    scale, heads = inputs.spec.model.softmax_scale, inputs.spec.num_heads
    sinks = torch.zeros(heads, device=inputs.device)

    def attend(q: torch.Tensor, pools: list[tuple[KVCache, torch.Tensor]]) -> torch.Tensor:
        rows = torch.cat([_gathered(cache, slots) for cache, slots in pools], dim=1).to(q.dtype)
        named = torch.cat([slots >= 0 for _, slots in pools], dim=1)[:, None]
        scores = (q @ rows.transpose(1, 2) * scale).float().masked_fill(~named, float("-inf"))
        column = sinks[None, :, None].expand(*scores.shape[:2], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        return weights.to(q.dtype) @ rows

    calls = [
        partial(attend, turn.q[:, :heads].to(inputs.dtype), attended_slots(inputs, turn))
        for turn in inputs.turns("forward_mqa")
    ]
    return Measured("forward_mqa", list(calls), inputs.selection.layout)


def _gathered(cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
    """Rows `[tokens, k, width]`, whatever for slots that name nothing."""
    return cache.read(slots.clamp_min(0).flatten()).unflatten(0, slots.shape)


def projection(inputs: Inputs) -> Measured:
    """The inverse rotation, and two products in the activation dtype."""
    groups, heads = inputs.spec.num_groups, inputs.spec.num_heads

    def project(
        x: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        grouped = rotate_back(x, positions, rope).flatten(1).unflatten(1, (groups, -1))
        low_rank = torch.einsum("tgd,grd->tgr", grouped, a.unflatten(0, (groups, -1)))
        return low_rank.flatten(1) @ b.T

    turns, calls = inputs.turns("o_proj"), []
    for turn, weights in zip(turns, inputs.weights(len(turns)), strict=True):
        wide = []
        for name in ("wo_a", "wo_b"):
            weight = weights[name]
            assert weight.scale is not None
            assert weight.block is not None
            wide.append(dequantize_block(weight.data, weight.scale, weight.block).to(inputs.dtype))
        x = turn.q[:, :heads].to(inputs.dtype)
        calls.append(partial(project, x, turn.step.positions, weights.rope, *wide))
    return Measured("o_proj", list(calls), inputs.selection.layout)


def index_topk(inputs: Inputs) -> Measured:
    """`torch.topk` of normal scores: in no order of entries, and not the lowest of those that tie."""
    kind, model = inputs.workload.kind, inputs.spec.model
    if kind.select != "top_k":
        raise Unmeasurable(f"{kind.name} layers have no indexer; measure another kind.")
    entries = kind.visible_entries(max(inputs.workload.total))
    k = min(model.index_topk, entries)
    calls = []
    for _ in inputs.turns("indexer.topk"):
        scores = torch.randn(inputs.workload.tokens, entries, device=inputs.device)
        calls.append(partial(scores.topk, k))
    return Measured("indexer.topk", list(calls), inputs.selection.layout)


def product(name: str, inputs: Inputs) -> Measured:
    """A product with a weight in the activation dtype."""
    turns, calls = inputs.turns(name), []
    for weights in inputs.weights(len(turns)):
        weight = weights[name]
        assert weight.scale is not None
        assert weight.block is not None
        wide = dequantize_block(weight.data, weight.scale, weight.block).to(inputs.dtype)
        x = torch.randn(inputs.workload.tokens, wide.shape[1], device=inputs.device).to(inputs.dtype)
        calls.append(partial(torch.nn.functional.linear, x, wide))
    return Measured(name, list(calls), inputs.selection.layout)
