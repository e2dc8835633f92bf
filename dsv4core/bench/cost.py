"""Bytes that have to move and operations that have to be done, whatever the kernel: hence the floor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dsv4core.api import KVCacheLayout, LayerSpec
from dsv4core.api.kvcache import DTYPE_BYTES
from dsv4core.bench.workload import Workload
from dsv4core.model.tensors import QUANTISED, layer_tensors


@dataclass(frozen=True)
class Cost:
    """What one call has to do.

    Attributes:
        bytes: Bytes that have to move.
        flops: Floating-point operations on values of the activation dtype.
        fp8_flops: Those of products whose weights or keys are FP8, which a device may do at another rate.
    """

    bytes: int
    flops: int = 0
    fp8_flops: int = 0

    @property
    def operations(self) -> int:
        """All floating-point operations."""
        return self.flops + self.fp8_flops

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops, self.fp8_flops + other.fp8_flops)


@dataclass(frozen=True)
class Ceilings:
    """What this device does at best, measured in the same run.

    Attributes:
        copy_gbps: Bandwidth of a copy, bytes read and written, in 1e9 bytes a second.
        matmul_tflops: Rate of a large matrix product in the activation dtype, in 1e12 operations a second.
        fp8_tflops: The same in FP8; where the device has none, that of the activation dtype.
    """

    copy_gbps: float
    matmul_tflops: float
    fp8_tflops: float

    def floor_us(self, cost: Cost) -> float:
        """Microseconds that a call of this cost takes at least."""
        computing = cost.flops / self.matmul_tflops + cost.fp8_flops / self.fp8_tflops
        return max(cost.bytes / self.copy_gbps / 1e3, computing / 1e6)


def costs(
    spec: LayerSpec, layout: KVCacheLayout, workload: Workload, dtype: str, q_dtype: str = ""
) -> Mapping[str, Cost]:
    """The cost of each operation, and of parts that are done alone, too, such as `indexer.logits`.

    Rows that several queries of a request attend count once where they have to be the same (the window, all
    entries), and for each query where they are chosen. Weights count in their stored dtype: FP8 where a
    checkpoint has FP8.

    Args:
        spec: The layer of one rank.
        layout: The formats of its caches.
        workload: The step.
        dtype: Activation dtype's name.
        q_dtype: That of q where attention reads it; the activation dtype if empty.
    """
    model, kind, tokens = spec.model, spec.kind, workload.tokens
    size, heads, width = DTYPE_BYTES[dtype], spec.num_heads, model.head_dim
    q = tokens * heads * width * size
    read_q = tokens * heads * width * DTYPE_BYTES[q_dtype or dtype]
    attended, read = _attended(workload, spec)
    rows = read["window"] * layout.window.bytes_per_token
    rows += read["compressed"] * layout.compressed.bytes_per_token
    work = 4 * attended * heads * width
    products = (0, work) if layout.window.scale == "tensor" else (work, 0)  # plain FP8 rows are multiplied so
    low = spec.num_groups * model.o_lora_rank
    weights = _weight_bytes(spec)
    hidden = tokens * model.hidden_size * size
    scored = sum(kind.visible_entries(length) for length in workload.lengths)
    found = {
        "prepare_step": Cost(0),
        "plan_step": Cost(4 * attended),
        "insert_kv": Cost(q + read_q + tokens * (width * size + layout.window.bytes_per_token)),
        "forward_mqa": Cost(read_q + q + rows, *products),
        "forward_mqa.step": Cost(read_q + q + rows, *products),
        "o_proj": Cost(
            q + hidden + weights["wo_a"] + weights["wo_b"],
            fp8_flops=2 * tokens * low * (heads * width // spec.num_groups + model.hidden_size),
        ),
        "o_proj.wo_a": Cost(
            tokens * (heads * width + low * size) + weights["wo_a"],
            fp8_flops=2 * tokens * low * heads * width // spec.num_groups,
        ),
        "inverse_rope_quant": Cost(q + tokens * heads * (width + width // 128 * 4)),
        "compress": Cost(0),
        "indexer": Cost(0),
        "indexer.logits": Cost(0),
        "indexer.topk": Cost(4 * (scored + tokens * model.index_topk)),
        "mixed_table": Cost(4 * 2 * tokens * (model.sliding_window + model.index_topk)),
    }
    for name, wide in {"wq_b": (model.q_lora_rank, heads * width), "wo_b": (low, model.hidden_size)}.items():
        moved = weights[name] + tokens * sum(wide) * size
        found[name] = Cost(moved, fp8_flops=2 * tokens * math.prod(wide))
    if kind.ratio is not None:
        found["compress"] = _compressor(workload, width, layout.compressed.bytes_per_token)
    if kind.select == "top_k":
        found["compress"] += _compressor(workload, model.index_head_dim, layout.index.bytes_per_token)
        keys = sum(map(kind.visible_entries, workload.total)) * layout.index.bytes_per_token
        index_q = tokens * model.index_n_heads * model.index_head_dim
        scoring = 2 * scored * model.index_n_heads * model.index_head_dim
        plain, fp8 = (scoring, 0) if layout.index.fp8 is None else (0, scoring)
        found["indexer"] = Cost(index_q * (size + 1) + keys, plain, fp8)
        found["indexer.logits"] = Cost(index_q + keys + 4 * scored, plain, fp8)
    tensors = layer_tensors(model, kind)
    ranks = model.num_attention_heads // heads
    matrices = {
        name: math.prod(tensor.shape) // (1 if tensor.split is None else ranks)
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and not name.endswith((".ape", "wo_a", "wo_b"))
    }
    quantised = sum(count for name, count in matrices.items() if tensors[name].dtypes == QUANTISED)
    found["project"] = Cost(
        hidden + q + sum(weights[name] for name in matrices),
        flops=2 * tokens * (sum(matrices.values()) - quantised),
        fp8_flops=2 * tokens * quantised,
    )
    whole = Cost(0)
    for name in ("project", "insert_kv", "compress", "indexer", "forward_mqa", "o_proj"):
        whole += found[name]
    return found | {"layer": whole, "layer.step": whole}


def _weight_bytes(spec: LayerSpec) -> dict[str, int]:
    """Bytes of this rank's weights, as a checkpoint has them."""
    ranks = spec.model.num_attention_heads // spec.num_heads
    return {
        name: math.prod(tensor.shape)
        * (1 if tensor.dtypes == QUANTISED else 2)
        // (1 if tensor.split is None else ranks)
        for name, tensor in layer_tensors(spec.model, spec.kind).items()
    }


def _compressor(workload: Workload, width: int, row: int) -> Cost:
    """Projected rows read; of each request's last rows states written; of earlier ones states read; entries.

    A row of state gives an entry the channels of one of its groups.
    """
    kind = workload.kind
    assert kind.ratio is not None
    window, state = kind.state_window, 2 * kind.groups * width * 4
    kept, earlier, completed = 0, 0, 0
    for query, total in zip(workload.query, workload.total, strict=True):
        begin = total - query
        ends = range(begin // kind.ratio * kind.ratio + kind.ratio - 1, total, kind.ratio)
        completed += len(ends)
        kept += min(query, window)
        earlier += sum(begin - max(0, end - window + 1) for end in ends if end - window + 1 < begin)
    states = (workload.tokens + kept) * state + earlier * state // kind.groups
    return Cost(states + completed * row)


def _attended(workload: Workload, spec: LayerSpec) -> tuple[int, dict[str, int]]:
    """Pairs of query and row over the step; and rows that have to be read of each pool."""
    model, kind = spec.model, spec.kind
    pairs, window, compressed = 0, 0, 0
    for query, total in zip(workload.query, workload.total, strict=True):
        lengths = range(total - query + 1, total + 1)
        seen = [min(model.sliding_window, length) for length in lengths]
        window += min(total, model.sliding_window + query - 1)
        chosen = [kind.visible_entries(length) for length in lengths]
        if kind.select == "top_k":
            chosen = [min(model.index_topk, count) for count in chosen]
            compressed += min(sum(chosen), kind.visible_entries(total))
        else:
            compressed += max(chosen)
        pairs += sum(seen) + sum(chosen)
    return pairs, {"window": window, "compressed": compressed}
