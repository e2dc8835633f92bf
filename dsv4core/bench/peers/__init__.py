"""Others who do the same, called directly: a row of theirs is a backend named `peer:<name>`.

A peer gets the inputs that a backend of dsv4core was planned for, so that both read the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from typing import Any

import torch

from dsv4core import ops
from dsv4core.api import ConfigError
from dsv4core.bench.inputs import Inputs, Turn
from dsv4core.bench.timing import Call
from dsv4core.kvcache import KVCache
from dsv4core.model.blocks import dequantize_block

Maker = Callable[[Inputs], "list[Call] | None"]


def peer_calls(name: str, operation: str, inputs: Inputs) -> tuple[str, list[Call]] | None:
    """The operation that the peer does, which may be a part of the asked one, and one call a turn.

    None where the peer has no such operation, or none for these inputs.
    """
    if operation not in PEERS[name]:
        return None
    part, maker = PEERS[name][operation]
    made = maker(inputs)
    return None if made is None else (part, made)


def check_peer(name: str) -> None:
    """Check that a peer can be called.

    Raises:
        ConfigError: There is no such peer, or its package is not installed.
    """
    if name not in PEERS:
        raise ConfigError(f"There is no peer {name!r}; the peers are {', '.join(PEERS)}.")
    if find_spec(PACKAGES[name]) is None:
        raise ConfigError(f"The peer {name!r} needs the package {PACKAGES[name]}, which is not installed.")


def peer_version(name: str) -> dict[str, str]:
    """The distribution of a peer and its version."""
    for distribution in packages_distributions().get(PACKAGES.get(name, ""), ()):
        try:
            return {distribution: version(distribution)}
        except PackageNotFoundError:
            continue
    return {}


def _slots(inputs: Inputs, turn: Turn) -> list[tuple[KVCache, torch.Tensor]]:
    """The slots `[tokens, k]` of each pool that a turn's queries read."""
    step, model, caches = turn.step, inputs.spec.model, inputs.caches
    window = step.window
    found = [
        (
            caches.window,
            ops.window_slots(
                step.positions,
                step.token_to_request,
                window.block_table,
                window.page_size,
                model.sliding_window,
            ),
        )
    ]
    kind = inputs.workload.kind
    if caches.compressed is not None and kind.ratio is not None:
        entries = turn.selected
        if entries is None:
            visible = (step.positions + 1) // kind.ratio
            entries = ops.visible_entries(visible, kind.visible_entries(max(inputs.workload.total)))
        table = step.compressed[kind.name]
        slots = ops.entry_slots(entries, step.token_to_request, table.block_table, table.page_size)
        found.append((caches.compressed, slots))
    return found


def _torch_attention(inputs: Inputs) -> list[Call]:
    """Gather, decode, two products, as a user of torch would write it."""
    scale, heads = inputs.spec.model.softmax_scale, inputs.spec.num_heads
    sinks = torch.zeros(heads, device=inputs.device)

    def attend(q: torch.Tensor, pools: list[tuple[KVCache, torch.Tensor]]) -> torch.Tensor:
        rows = torch.cat([_gathered(cache, slots) for cache, slots in pools], dim=1).to(q.dtype)
        named = torch.cat([slots >= 0 for _, slots in pools], dim=1)[:, None]
        scores = (q @ rows.transpose(1, 2) * scale).float().masked_fill(~named, float("-inf"))
        column = sinks[None, :, None].expand(*scores.shape[:2], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        return weights.to(q.dtype) @ rows

    return [
        partial(attend, turn.q[:, :heads].to(inputs.dtype), _slots(inputs, turn)) for turn in inputs.turns
    ]


def _gathered(cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
    """Rows `[tokens, k, width]`, whatever for slots that name nothing."""
    return cache.read(slots.clamp_min(0).flatten()).unflatten(0, slots.shape)


def _torch_projection(inputs: Inputs) -> list[Call]:
    """Two products in bf16, the inverse rotation left out."""
    made: list[Call] = []
    groups = inputs.spec.num_groups

    def project(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        grouped = x.flatten(1).unflatten(1, (groups, -1))
        low_rank = torch.einsum("tgd,grd->tgr", grouped, a.unflatten(0, (groups, -1)))
        return low_rank.flatten(1) @ b.T

    for number, (_, weights) in enumerate(inputs.layers(3)):
        wide = []
        for name in ("wo_a", "wo_b"):
            weight = weights[name]
            assert weight.scale is not None
            assert weight.block is not None
            wide.append(dequantize_block(weight.data, weight.scale, weight.block).to(inputs.dtype))
        turn = inputs.turns[number % len(inputs.turns)]
        heads = turn.q[:, : inputs.spec.num_heads].to(inputs.dtype)

        def call(
            x: torch.Tensor = heads, a: torch.Tensor = wide[0], b: torch.Tensor = wide[1]
        ) -> torch.Tensor:
            grouped = x.flatten(1).unflatten(1, (groups, -1))
            low_rank = torch.einsum("tgd,grd->tgr", grouped, a.unflatten(0, (groups, -1)))
            return low_rank.flatten(1) @ b.T

        made.append(call)
    return made


def _flashmla_attention(inputs: Inputs) -> list[Call] | None:
    """FlashMLA's decode on packed rows, every query a row of its batch.

    Its schedule, which layers of a kind share in a step, is made by the first call: lengths do not change.
    """
    import flash_mla

    heads, packed = inputs.spec.num_heads, inputs.selection.layout.window.name == "fp8_ds_mla"
    if not packed or heads > 128 or inputs.workload.phase != "decode":
        return None
    padded = 64 if heads <= 64 else 128
    legacy = {"use_legacy": True, "kv_format": "V4"} if hasattr(flash_mla, "has_legacy") else {}
    sinks = torch.full((padded,), float("-inf"), device=inputs.device)
    sinks[:heads] = 0

    def one(turn: Turn) -> Call:
        q = torch.nn.functional.pad(turn.q[:, :heads], (0, 0, 0, padded - heads)).to(torch.bfloat16)[:, None]
        pools = [(cache.pool[:, :, None], _padded(slots, padded)) for cache, slots in _slots(inputs, turn)]
        lengths = [(slots >= 0).sum(-1, dtype=torch.int32) for _, slots in _slots(inputs, turn)]
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

    return [one(turn) for turn in inputs.turns]


def _padded(slots: torch.Tensor, heads: int) -> torch.Tensor:
    """`[tokens, 1, width]`, as wide as the kernel wants it."""
    multiple = 64 if heads == 64 else 128
    slots = torch.nn.functional.pad(slots, (0, -slots.shape[1] % multiple), value=-1)
    return slots[:, None].contiguous()


def _deepgemm_projection(inputs: Inputs) -> list[Call]:
    """DeepGEMM's grouped product alone: `wo_a` on rows that are quantised already, sm_90's recipe."""
    import deep_gemm

    model, groups, tokens = inputs.spec.model, inputs.spec.num_groups, inputs.workload.tokens
    wide = inputs.spec.num_heads // groups * model.head_dim
    made: list[Call] = []
    for _, weights in inputs.layers(3):
        weight = weights["wo_a"]
        assert weight.scale is not None
        w = weight.data.view(groups, model.o_lora_rank, wide)
        scale = weight.scale.float().view(groups, model.o_lora_rank // 128, wide // 128).contiguous()
        a = torch.randn(tokens, groups, wide, device=inputs.device).to(torch.float8_e4m3fn)
        a_scale = torch.ones(tokens, groups, wide // 128, device=inputs.device)
        z = torch.empty(tokens, groups, model.o_lora_rank, dtype=torch.bfloat16, device=inputs.device)

        operands = ("bhr,hdr->bhd", (a, a_scale), (w, scale), z)
        made.append(partial(deep_gemm.fp8_einsum, *operands, recipe=(1, 128, 128)))
    return made


def _deepgemm_index_logits(inputs: Inputs) -> list[Call] | None:
    """DeepGEMM's paged scores alone: no rotation, no quantisation, no top-k."""
    import deep_gemm

    keys, kind, model = inputs.caches.index, inputs.workload.kind, inputs.spec.model
    if keys is None or keys.page_size != 64 or inputs.workload.phase != "decode" or kind.ratio is None:
        return None
    ratio = kind.ratio
    processors = torch.cuda.get_device_properties(inputs.device).multi_processor_count

    def one(turn: Turn) -> Call:
        tokens = turn.step.num_tokens
        q = torch.randn(tokens, 1, model.index_n_heads, model.index_head_dim, device=inputs.device)
        q = q.to(torch.float8_e4m3fn)
        weights = torch.randn(tokens, model.index_n_heads, device=inputs.device)
        lengths = ((turn.step.positions + 1) // ratio).int().clamp_min(1)[:, None].contiguous()
        table = turn.step.compressed[kind.name].block_table
        cache, most = keys.pool[:, :, None], kind.visible_entries(max(inputs.workload.total))

        def call() -> object:
            schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, processors)
            return deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, table, schedule, most, False)

        return call

    return [one(turn) for turn in inputs.turns]


PACKAGES = {"torch": "torch", "flashmla": "flash_mla", "deepgemm": "deep_gemm"}
PEERS: Mapping[str, Mapping[str, tuple[str, Maker]]] = {
    "torch": {"forward_mqa": ("forward_mqa", _torch_attention), "o_proj": ("o_proj", _torch_projection)},
    "flashmla": {"forward_mqa": ("forward_mqa", _flashmla_attention)},
    "deepgemm": {
        "o_proj": ("o_proj.wo_a", _deepgemm_projection),
        "indexer": ("indexer.logits", _deepgemm_index_logits),
    },
}
"""What each peer does for an operation: the operation or a part of it, and what makes the calls."""
