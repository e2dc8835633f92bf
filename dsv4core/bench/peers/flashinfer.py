"""FlashInfer's attention on plain bf16 rows: it has none for packed rows but on sm_120.

Arguments are those of FlashInfer 0.6.18.
"""

from __future__ import annotations

import inspect

import torch

from dsv4core import ops
from dsv4core.bench.gaps import Unmeasurable
from dsv4core.bench.inputs import Inputs, Turn
from dsv4core.bench.operations import Measured
from dsv4core.bench.peers.slots import attended_slots
from dsv4core.bench.timing import Call
from dsv4core.kvcache import KVCache, cache_layout

WORKSPACE = 128 << 20
"""Bytes; what FlashInfer recommends."""
CHUNK = 1 << 16
"""Rows that are converted at once."""


def attention(inputs: Inputs) -> Measured:
    """Attention over bf16 copies of the pools, by what this architecture has."""
    arch = inputs.selection.request.arch
    if arch not in _MAKERS:
        raise Unmeasurable(
            f"FlashInfer has kernels for plain rows of DeepSeek-V4 on {', '.join(_MAKERS)}, and this is "
            f"{arch or 'a CPU'}; leave the peer out here."
        )
    if inputs.dtype != torch.bfloat16:
        raise Unmeasurable("FlashInfer is called with bf16 queries; set dtype=bfloat16.")
    layout = cache_layout(inputs.spec.model, "bf16", "bf16")
    return Measured("forward_mqa", _MAKERS[arch](inputs), layout)


def wrapper_alone(inputs: Inputs) -> Measured:
    """The MLA wrapper's own time on sm_90: all is planned, and no sink is added."""
    if inputs.selection.request.arch != "sm_90" or inputs.dtype != torch.bfloat16:
        raise Unmeasurable(
            "FlashInfer's MLA wrapper is called on sm_90 with bf16 queries; set dtype=bfloat16."
        )
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    turns, heads, width = inputs.turns("forward_mqa"), inputs.spec.num_heads, inputs.spec.model.head_dim
    listed = [_row_numbers(attended_slots(inputs, turn)) for turn in turns]
    rows = _plain_rows([cache for cache, _ in attended_slots(inputs, turns[0])])[:, None]
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=inputs.device)

    def one(turn: Turn, numbers: torch.Tensor, counts: torch.Tensor) -> Call:
        starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        queries = torch.arange(len(counts) + 1, dtype=torch.int32, device=inputs.device)
        wrapper, scale = (
            BatchMLAPagedAttentionWrapper(workspace, backend="fa3"),
            inputs.spec.model.softmax_scale,
        )
        planned = (queries, starts, numbers, counts, heads, width, 0, 1, False, scale)
        wrapper.plan(*planned, torch.bfloat16, torch.bfloat16)
        q = turn.q[:, :heads].to(torch.bfloat16).contiguous()
        arguments = (q, q[..., :0], rows, rows[..., :0])
        return lambda: wrapper.run(*arguments, return_lse=True, return_lse_base_on_e=True)

    layout = cache_layout(inputs.spec.model, "bf16", "bf16")
    calls = [one(turn, *own) for turn, own in zip(turns, listed, strict=True)]
    return Measured("forward_mqa.step", calls, layout)


def _by_wrapper(inputs: Inputs) -> list[Call]:
    """The MLA wrapper as a kernel for lists of rows: both pools in one space of rows, a page each.

    One plan serves all turns, as it would serve all layers of a kind in a step: it depends on lengths alone.
    Each call puts its rows' numbers where the plan expects them, and adds the sink, of which the wrapper
    knows nothing.
    """
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    turns, heads, device = inputs.turns("forward_mqa"), inputs.spec.num_heads, inputs.device
    listed = [_row_numbers(attended_slots(inputs, turn)) for turn in turns]
    rows = _plain_rows([cache for cache, _ in attended_slots(inputs, turns[0])])[:, None]
    numbers, counts = listed[0]
    starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    queries = torch.arange(len(counts) + 1, dtype=torch.int32, device=device)
    planned = torch.empty_like(numbers)
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(WORKSPACE, dtype=torch.uint8, device=device),
        use_cuda_graph=True,
        qo_indptr=torch.empty_like(queries),
        kv_indptr=torch.empty_like(starts),
        kv_indices=planned,
        kv_len_arr=torch.empty_like(counts),
        backend="fa3",
    )
    width, scale, bf16 = inputs.spec.model.head_dim, inputs.spec.model.softmax_scale, torch.bfloat16
    wrapper.plan(queries, starts, numbers, counts, heads, width, 0, 1, False, scale, bf16, bf16)
    sinks, no_keys = torch.zeros(heads, device=device), rows.new_empty(len(rows), 1, 0)

    def one(turn: Turn, numbers: torch.Tensor) -> Call:
        q = turn.q[:, :heads].to(bf16).contiguous()
        no_query = q.new_empty(*q.shape[:2], 0)

        def call() -> object:
            planned.copy_(numbers)
            out, lse = wrapper.run(q, no_query, rows, no_keys, return_lse=True, return_lse_base_on_e=True)
            return out.mul_(torch.sigmoid(lse - sinks)[..., None])

        return call

    return [one(turn, numbers) for turn, (numbers, _) in zip(turns, listed, strict=True)]


def _row_numbers(attended: list[tuple[KVCache, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of all rows, query after query, in the pools laid end to end; and how many each query has."""
    shifted, first = [], 0
    for cache, slots in attended:
        shifted.append(torch.where(slots >= 0, slots + first, -1))
        first += cache.num_pages * cache.page_size
    table = torch.cat(shifted, dim=1)
    return table[table >= 0], (table >= 0).sum(-1, dtype=torch.int32)


def _by_trtllm(inputs: Inputs) -> list[Call]:
    """TRTLLM-gen's sparse decode on two pools; layers without a compressor give their window twice."""
    from flashinfer.mla import trtllm_batch_decode_sparse_mla_dsv4 as decode

    turns, heads, device = inputs.turns("forward_mqa"), inputs.spec.num_heads, inputs.device
    model, workload = inputs.spec.model, inputs.workload
    if workload.phase != "decode" or min(workload.total) < model.sliding_window:
        raise Unmeasurable(
            f"FlashInfer's sparse decode is called for full windows of decodes, and this is {workload}; set "
            f"bench.phase=[decode] and a bench.context well above {model.sliding_window}."
        )
    pools = [
        _plain_rows([cache]).unflatten(0, (cache.num_pages, cache.page_size))
        for cache, _ in attended_slots(inputs, turns[0])
    ]
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    sinks = torch.zeros(heads, device=device)

    def one(turn: Turn) -> Call:
        slots = [slots for _, slots in attended_slots(inputs, turn)]
        pages = [(pool.shape[1], pool.shape[1]) for pool in (pools[0], pools[-1])]
        table, lengths = ops.mixed_sparse_indices(slots[0], slots[1] if slots[1:] else None, *pages)
        arguments = {
            "query": turn.q[:, None, :heads].to(torch.bfloat16).contiguous(),
            "swa_kv_cache": pools[0],
            "workspace_buffer": workspace,
            "sparse_indices": table,
            "compressed_kv_cache": pools[-1],
            "sparse_topk_lens": lengths,
            "seq_lens": (turn.step.positions + 1).int(),
            "bmm1_scale": model.softmax_scale,
            "bmm2_scale": 1.0,
            "sinks": sinks,
        }
        try:
            inspect.signature(decode).bind(**arguments)
        except TypeError as error:
            raise Unmeasurable(
                f"The installed FlashInfer takes other arguments ({error}); install version 0.6.18."
            ) from error
        return lambda: decode(**arguments)

    return [one(turn) for turn in turns]


def _plain_rows(caches: list[KVCache]) -> torch.Tensor:
    """All rows of pools, `[rows, width]` bf16, one pool after the other."""
    sizes = [cache.num_pages * cache.page_size for cache in caches]
    width = sum(part.width for part in caches[0].format.parts if part.name != "scale")
    rows = torch.empty(sum(sizes), width, dtype=torch.bfloat16, device=caches[0].pool.device)
    for cache, own in zip(caches, rows.split(sizes), strict=True):
        slots = torch.arange(len(own), device=own.device)
        for part, numbers in zip(own.split(CHUNK), slots.split(CHUNK), strict=True):
            part.copy_(cache.read(numbers))
    return rows


_MAKERS = {"sm_90": _by_wrapper, "sm_100": _by_trtllm, "sm_103": _by_trtllm}
