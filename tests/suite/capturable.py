"""A right backend whose shapes depend on limits alone, so that its hooks and whole layers can be captured."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch

from dsv4core import ops
from dsv4core.api import OWN_OPS, hookimpl
from dsv4core.backends.reference_layer import ReferenceStep
from dsv4core.kvcache import KVCache
from dsv4core.kvcache.codecs import encode_rows
from dsv4core.model.rope import rotate
from dsv4core.ops.norm import rms_norm
from dsv4core.step import slot_mapping
from tests.suite.mutants import Attention


class Capturable(Attention):
    """Reads every lane of every table, and leaves out by masks what does not count."""

    own: ClassVar[frozenset[str]] = OWN_OPS
    capabilities: ClassVar[frozenset[str]] = frozenset({"graph"})

    @hookimpl
    def dsv4_plan_layer(self, request, layer):
        """A few copies of every row that is gathered, and of every score."""
        plan, model, limits = super().dsv4_plan_layer(request, layer), layer.model, request.limits
        lanes = model.sliding_window + layer.kind.visible_entries(limits.max_model_len)
        wide = max(model.head_dim, layer.kind.groups * model.head_dim)
        row = 4 * (2 * wide + layer.num_heads + model.index_n_heads)
        return replace(plan, workspace_bytes=6 * limits.max_tokens * lanes * row)

    class Step(ReferenceStep):
        def _all_entries(self, step):
            visible = (step.positions + 1) // self.kind.ratio
            return self.slots(ops.visible_entries(visible, step.limits.max_model_len // self.kind.ratio))

    def attend(self, q, pools, scale, sinks, want_lse):
        rows = torch.cat([_read(cache, slots) for cache, slots in pools], dim=1)
        named = torch.cat([slots >= 0 for _, slots in pools], dim=1)[:, None]
        scores = torch.einsum("thd,tkd->thk", q.float() * scale, rows).masked_fill(~named, -math.inf)
        lse = scores.logsumexp(-1)
        total = lse if sinks is None else torch.logaddexp(lse, sinks)
        weights = (scores - total[..., None]).exp().masked_fill(~named, 0.0)
        return torch.einsum("thk,tkd->thd", weights, rows).to(q.dtype), lse if want_lse else None

    @hookimpl
    def dsv4_insert_kv(self, layer, state, q, kv, positions, caches, step):
        _write(
            caches.window, step.window.slot_mapping, rotate(kv.float()[:, None], positions, state.rope)[:, 0]
        )
        normed = rms_norm(q.float(), None, layer.model.rms_norm_eps)
        return rotate(normed, positions, state.rope).to(q.dtype)

    @hookimpl
    def dsv4_compress(self, layer, state, projected, positions, caches, step, target):
        kind, main = layer.kind, target == "compressed"
        prefix = "compressor" if main else "indexer.compressor"
        ape, norm = (state.weights[f"{prefix}.{name}"].data for name in ("ape", "norm"))
        states, entries = (caches.state, caches.compressed) if main else (caches.index_state, caches.index)
        values, scores = projected.chunk(2, dim=-1)
        rows = torch.cat([values, scores + ape[positions % kind.ratio]], dim=-1)
        pooled = _pooled(rows, positions, kind, step, states)
        first = positions // kind.ratio * kind.ratio
        entry = rotate(rms_norm(pooled, norm, layer.model.rms_norm_eps), first, state.rope)
        _write(entries, step.compressed[kind.name].slot_mapping, entry)
        _write(states, step.state[kind.name].slot_mapping, rows)

    @hookimpl
    def dsv4_index_logits(self, layer, q, weights, visible, tokens, width, caches, step):
        table, requests = step.compressed[layer.kind.name], step.token_to_request[tokens]
        slots = ops.visible_slots(visible, requests, table.block_table, table.page_size, width)
        products = torch.einsum("thd,tkd->thk", q.float(), _read(caches.index, slots)).relu()
        return torch.einsum("th,thk->tk", weights, products)

    @hookimpl
    def dsv4_index_topk(self, layer, logits, visible):
        k, entry = layer.model.index_topk, torch.arange(logits.shape[1], device=logits.device)
        known = torch.where((logits > -math.inf) & (entry < visible[:, None]), logits, -math.inf)  # not NaN
        known = torch.nn.functional.pad(known, (0, max(0, k - known.shape[1])), value=-math.inf)
        best = known.sort(dim=-1, descending=True, stable=True)
        return torch.where(best.values > -math.inf, best.indices, -1)[:, :k].int()


def _read(cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
    """Rows `[tokens, k, width]`, zeros for slots that name nothing."""
    rows = cache.read(slots.clamp_min(0).flatten()).unflatten(0, slots.shape)
    return torch.where(slots[..., None] >= 0, rows, 0.0)


def _write(cache: KVCache, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Tokens that store nothing repeat what another one stores, or what is there."""
    live = slots >= 0
    one = live.int().argmax(0, keepdim=True)  # a tensor of one: an index of none would be waited for
    target = torch.where(live, slots, slots[one]).clamp_min(0)
    page, offset = target // cache.page_size, target % cache.page_size
    for view, data in zip(cache.regions, encode_rows(cache.format, rows), strict=True):
        same = torch.where(live[:, None], data, data[one])
        view[page, offset] = torch.where(live.any(), same, view[page, offset])


def _pooled(rows, positions, kind, step, states):
    """The pooled row of the group that ends at each token, whether it does or not."""
    tokens, pooled = positions.shape[0], kind.state_window
    back = torch.arange(pooled - 1, -1, -1, device=positions.device)
    request = step.token_to_request.long()[:, None]
    position, token = positions[:, None] - back, torch.arange(tokens, device=positions.device)[:, None] - back
    table = step.state[kind.name]
    slots = slot_mapping(table.block_table, request.expand_as(position), position, table.page_size)
    in_step = token >= step.query_start_loc[request]
    found = torch.where(in_step[..., None], rows[token.clamp_min(0)], _read(states, slots))
    half = torch.arange(pooled, device=positions.device) // kind.ratio
    values, scores = (
        part.unflatten(-1, (kind.groups, -1))[:, torch.arange(pooled, device=positions.device), half]
        for part in found.chunk(2, dim=-1)
    )
    nothing = (position < 0)[..., None]
    weights = scores.masked_fill(nothing, -math.inf).softmax(1)
    return (weights * values.masked_fill(nothing, 0.0)).sum(1)
