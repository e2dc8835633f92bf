"""DeepGEMM's parts of the output projection and of the indexer."""

from __future__ import annotations

from functools import partial

import torch

from dsv4core.bench.gaps import Unmeasurable
from dsv4core.bench.inputs import Inputs, Turn
from dsv4core.bench.operations import Measured
from dsv4core.bench.timing import Call


def projection(inputs: Inputs) -> Measured:
    """The grouped product alone: `wo_a` on rows that are quantised already, sm_90's recipe."""
    import deep_gemm

    model, groups, tokens = inputs.spec.model, inputs.spec.num_groups, inputs.workload.tokens
    wide = inputs.spec.num_heads // groups * model.head_dim
    calls: list[Call] = []
    for weights in inputs.weights(len(inputs.turns("o_proj.wo_a"))):
        weight = weights["wo_a"]
        assert weight.scale is not None
        w = weight.data.view(groups, model.o_lora_rank, wide)
        scale = weight.scale.float().view(groups, model.o_lora_rank // 128, wide // 128).contiguous()
        a = torch.randn(tokens, groups, wide, device=inputs.device).to(torch.float8_e4m3fn)
        a_scale = torch.ones(tokens, groups, wide // 128, device=inputs.device)
        z = torch.empty(tokens, groups, model.o_lora_rank, dtype=torch.bfloat16, device=inputs.device)

        operands = ("bhr,hdr->bhd", (a, a_scale), (w, scale), z)
        calls.append(partial(deep_gemm.fp8_einsum, *operands, recipe=(1, 128, 128)))
    return Measured("o_proj.wo_a", calls, inputs.selection.layout)


def index_logits(inputs: Inputs) -> Measured:
    """The paged scores alone: no rotation, no quantisation, no top-k."""
    keys, kind, model = inputs.caches.index, inputs.workload.kind, inputs.spec.model
    if keys is None or kind.ratio is None:
        raise Unmeasurable(f"{kind.name} layers have no indexer; measure another kind.")
    if keys.page_size != 64 or inputs.workload.phase != "decode":
        raise Unmeasurable(
            f"DeepGEMM's paged scores decode on pages of 64 keys, and this is {inputs.workload.phase} on "
            f"pages of {keys.page_size}; set bench.phase=[decode] and request.page_sizes.context="
            f"{64 * kind.ratio}."
        )
    import deep_gemm

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

    return Measured(
        "indexer.logits",
        [one(turn) for turn in inputs.turns("indexer.logits")],
        inputs.selection.layout,
    )
