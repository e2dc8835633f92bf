"""Plain torch in place of vLLM's CPU kernels for DeepSeek-V4, for processors that lack AVX-512 and AMX.

vLLM builds those kernels for such processors only; elsewhere its model stops at the first one. The metadata,
the scheduler, the cache layout and every index are vLLM's own either way. `install` says how many it adds.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn import functional

from dsv4core.kvcache import KVCache, cache_layout
from dsv4core.model.shapes import PRESETS

logger = logging.getLogger("vllm.dsv4_job")
FORMATS = cache_layout(PRESETS["v4_flash"], "fp8_ds_mla", "fp8")
LARGEST = 448.0  # of e4m3
installed: list[str] = []
"""Kernels that plain torch stands in for in this process."""


def install() -> None:
    """Add the missing kernels, and let the platform serve chunked prefill and prefix caching with them."""
    import vllm._custom_ops  # noqa: F401  it looks once for the kernels that exist
    from vllm.platforms.cpu import CpuPlatform

    missing = [name for name in KERNELS if not hasattr(torch.ops._C, name)]
    if not missing or getattr(CpuPlatform, "_dsv4_job", False):
        return
    installed.extend(missing)
    for name in missing:
        setattr(torch.ops._C, name, KERNELS[name])
    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        amx = torch.cpu._is_amx_tile_supported
        torch.cpu._is_amx_tile_supported = lambda: True
        try:
            check(cls, vllm_config)
        finally:
            torch.cpu._is_amx_tile_supported = amx

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    CpuPlatform._dsv4_job = True
    logger.warning("No AVX-512 here: plain torch stands in for %d of vLLM's kernels.", len(missing))


def _cache(pages: torch.Tensor, rows: int, format: Any) -> KVCache:
    size, stride = (pages.shape[0], rows, format.row_width), (pages.stride(0), format.row_width, 1)
    return KVCache(pages.as_strided(size, stride), format)


def _rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """Rotate the last channels by pairs, as GPT-J does; fp32."""
    width = table.shape[1]
    cos, sin = table[positions.long()].float().chunk(2, -1)
    while cos.dim() < x.dim():
        cos, sin = cos[:, None], sin[:, None]
    even, odd = x[..., -width::2].float(), x[..., 1 - width :: 2].float()
    rotated = torch.stack((even * cos - sign * odd * sin, sign * even * sin + odd * cos), -1)
    return torch.cat((x[..., :-width].float(), rotated.flatten(-2)), -1)


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def fused_qnorm_rope_kv_insert_cpu(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    heads: int,
    eps: float,
    rows: int,
) -> torch.Tensor:
    """Normalise and rotate q, pad its heads; rotate kv and store it."""
    tokens = slots.shape[0]
    rotated = _rotate(kv[:tokens], positions[:tokens], table)
    _cache(pages, rows, FORMATS.window).write(slots, rotated)
    q = _rotate(_rms(q.float(), eps), positions, table).to(q.dtype)
    return functional.pad(q, (0, 0, 0, heads - q.shape[1]))


def flash_mla_with_kvcache_cpu(
    out: torch.Tensor,
    q: torch.Tensor,
    window: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: int,
    compressed: torch.Tensor,
    compressed_slots: torch.Tensor,
    compressed_rows: int,
    sink: torch.Tensor,
    scale: float,
) -> None:
    """Attend, one token after the other."""
    pools = [(_cache(window, window_rows, FORMATS.window), window_slots)]
    if compressed_slots.shape[1]:
        pools.append((_cache(compressed, compressed_rows, FORMATS.window), compressed_slots))
    for token, query in enumerate(q.float()):
        keys = torch.cat([cache.read(slots[token][slots[token] >= 0]) for cache, slots in pools])
        scores = torch.cat((query @ keys.T * scale, sink[:, None].float()), 1)
        out[token] = scores.softmax(-1)[:, :-1] @ keys


def inverse_gptj_rope_o_proj_cpu(
    o: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, rope_dim: int
) -> torch.Tensor:
    """Rotate the attention output back."""
    return _rotate(o, positions, table, sign=-1)


def bmm_cpu(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, packed: bool, scale: object) -> None:
    """Multiply group by group."""
    out.copy_(x.float() @ weight.float().transpose(1, 2))


def save_partial_states_cpu(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store projected keys and scores, the scores with their position's embedding."""
    tokens = slots.shape[0]
    score = score[:tokens].float() + ape.float()[positions[:tokens] % ape.shape[0]]
    rows = torch.cat((kv[:tokens].float(), score), -1)[slots >= 0]
    kept, size = slots[slots >= 0].long(), state.shape[1]
    state[kept // size, kept % size] = rows.to(state.dtype)


def _compress(
    format: Any,
    state: torch.Tensor,
    gathered: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    pages: torch.Tensor,
    rows: int,
    ratio: int,
) -> None:
    """Pool the group that each token completes, normalise, rotate at its first token, store."""
    tokens, width = slots.shape[0], norm.shape[0]
    done = ((positions[:tokens] + 1) % ratio == 0) & (slots >= 0)
    if not done.any():
        return
    source = gathered[:tokens][done]
    place, size = source.clamp_min(0).long(), state.shape[1]
    kv, score = state[place // size, place % size].float().chunk(2, -1)
    if kv.shape[-1] > width:  # overlapping groups: the older half of the window reads the first channels
        kv = torch.cat((kv[:, :ratio, :width], kv[:, ratio:, width:]), 1)
        score = torch.cat((score[:, :ratio, :width], score[:, ratio:, width:]), 1)
    absent = (source < 0)[..., None]
    share = score.masked_fill(absent, -torch.inf).softmax(1)
    entry = _rms((share * kv.masked_fill(absent, 0)).sum(1), eps) * norm
    entry = _rotate(entry, positions[:tokens][done] + 1 - ratio, table)
    _cache(pages, rows, format).write(slots[done], entry)


def compress_norm_rope_store_cpu(*arguments: Any) -> None:
    """Compress into the packed format."""
    _compress(FORMATS.compressed, *arguments)


def compress_norm_rope_store_indexer_cpu(*arguments: Any) -> None:
    """Compress into the indexer's keys."""
    _compress(FORMATS.index, *arguments)


def fused_indexer_q_rope_quant_cpu(
    positions: torch.Tensor,
    q: torch.Tensor,
    table: torch.Tensor,
    q_out: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    weights_out: torch.Tensor,
) -> None:
    """Rotate and quantise the indexer's queries; fold their scales into the weights."""
    q = _rotate(q, positions, table)
    scale = torch.exp2(torch.ceil(torch.log2(q.abs().amax(-1).clamp_min(1e-4) / LARGEST)))
    q_out.copy_((q / scale[..., None]).to(q_out.dtype))
    weights_out.copy_(weights * scale * softmax_scale * head_scale)


def fp8_paged_mqa_logits_cpu(
    q: torch.Tensor,
    pages: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    rows: int,
    longest: int,
) -> torch.Tensor:
    """Score the entries that each query sees."""
    cache = _cache(pages, rows, FORMATS.index)
    logits = torch.full((q.shape[0], longest), -torch.inf)
    for token, length in enumerate(lengths.tolist()):
        entry = torch.arange(length)
        keys = cache.read(table[token].long()[entry // rows] * rows + entry % rows)
        logits[token, :length] = (functional.relu(q[token].float() @ keys.T) * weights[token, :, None]).sum(0)
    return logits


def topk_transform_512_cpu(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    page_indices: torch.Tensor,
    rows: int,
    indices: torch.Tensor,
) -> None:
    """Choose 512 entries of each query, -1 behind."""
    indices.fill_(-1)
    for token, length in enumerate(lengths.tolist()):
        chosen = scores[token, :length].topk(min(length, 512)).indices
        indices[token, : chosen.shape[0]] = chosen.to(indices.dtype)


def _router_scores(logits: torch.Tensor, function: str) -> torch.Tensor:
    logits = logits.float()
    if function == "sqrtsoftplus":
        return functional.softplus(logits).sqrt()
    return logits.softmax(-1) if function == "softmax" else logits.sigmoid()


def biased_topk_cpu(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor,
    topk: int,
    renormalise: bool,
    function: str,
    shared: int,
    factor: float | None,
    on_output: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by biased scores, weigh them by the scores."""
    scores = _router_scores(logits, function)
    experts = (scores + bias.float()).topk(topk, -1).indices
    weights = scores.gather(-1, experts)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * (1.0 if on_output or factor is None else factor), experts.int()


def hash_topk_cpu(
    logits: torch.Tensor,
    table: torch.Tensor,
    topk: int,
    function: str,
    shared: int,
    experts: int,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weigh the experts that the tokens' hash names."""
    weights = _router_scores(logits, function).gather(-1, table.long())
    return weights / weights.sum(-1, keepdim=True) * factor, table.int()


def hc_pre_fused_cpu(
    x: torch.Tensor,
    projection: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    streams: int,
    iterations: int,
    rms_eps: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mix the residual streams of a hyper-connection into a layer's input."""
    mixes = _rms(x.float().flatten(1), rms_eps) @ projection.float().T
    before, after, among = mixes.split((streams, streams, streams * streams), 1)
    first, second, third = base.float().split((streams, streams, streams * streams))
    before = torch.sigmoid(before * scale[0] + first) + eps
    after = 2 * torch.sigmoid(after * scale[1] + second)
    among = (among * scale[2] + third).view(-1, streams, streams).softmax(-1) + eps
    among = among / (among.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        among = among / (among.sum(2, keepdim=True) + eps)
        among = among / (among.sum(1, keepdim=True) + eps)
    return (before[..., None] * x.float()).sum(1).to(x.dtype), after, among


def hc_post_fused_cpu(
    x: torch.Tensor, residual: torch.Tensor, after: torch.Tensor, among: torch.Tensor
) -> torch.Tensor:
    """Give a layer's output back to the streams."""
    mixed = torch.einsum("tij,tid->tjd", among.float(), residual.float())
    return (after[..., None] * x.float()[:, None] + mixed).to(x.dtype)


def hc_head_fused_cpu(
    x: torch.Tensor,
    projection: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    eps: float,
    rms_eps: float,
) -> torch.Tensor:
    """Mix the streams into the output."""
    mixes = _rms(x.float().flatten(1), rms_eps) @ projection.float().T
    share = torch.sigmoid(mixes * scale.float() + base.float()) + eps
    return (share[..., None] * x.float()).sum(1).to(x.dtype)


def convert_weight_packed(weight: torch.Tensor) -> torch.Tensor:
    """Leave a weight as it is: only the real kernels read a packed one."""
    return weight


KERNELS = {name: value for name, value in list(globals().items()) if name.endswith(("_cpu", "_packed"))}
