"""sm_90: FlashAttention 3 behind FlashInfer's MLA wrapper, as a kernel for lists of rows.

A row is a page of its own, and a query token a request of its own: all that a plan needs are numbers of rows,
which follow from lengths that the host knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

from dsv4_plugin_flashinfer import apply_sink, library, row_numbers
from dsv4_plugin_flashinfer.compress.prepared import Compressors
from dsv4_plugin_flashinfer.plugin import MOST_ROWS, PLAN_WORKSPACE, WINDOW
from dsv4_plugin_flashinfer.row_numbers import Place
from dsv4core import libraries, ops
from dsv4core.api import (
    AttentionOutput,
    ConfigError,
    LayerCaches,
    LayerKind,
    LayerPlan,
    LayerSpec,
    LayerWeights,
    Request,
    Step,
)
from dsv4core.api.kvcache import KVCacheFormat
from dsv4core.attention import core_operations
from dsv4core.ops.o_proj.prepared import OutputProjection

UNITS = (16, 512)
"""Bytes that rows may be apart by: at least what the kernel loads at once; at most what all rows are apart by
whose pools torch allocates, so that int32 numbers reach as far as possible."""


def own_operations(plan: LayerPlan) -> tuple[ModuleType, ModuleType]:
    """The backend's own two, likewise."""
    if plan.core_ops == "torch":
        return row_numbers.reference, apply_sink.reference
    from dsv4_plugin_flashinfer.apply_sink import triton as sink_kernel
    from dsv4_plugin_flashinfer.row_numbers import triton as number_kernel

    return number_kernel, sink_kernel


class SharedStep:
    """The plan of a step, made on the host, and the table of rows that it speaks of."""

    def __init__(
        self, request: Request, kind: LayerKind, plan: LayerPlan, rows: KVCacheFormat, device: torch.device
    ) -> None:
        """Keep what does not change.

        Args:
            request: What was selected for.
            kind: The layers' kind.
            plan: Their plan.
            rows: The format of cached rows.
            device: Where.
        """
        self.kind, self._request, self._device = kind, request, device
        self._dtype = getattr(torch, rows.storage_dtype)
        self._numbers, _ = own_operations(plan)
        self._workspace = torch.empty(PLAN_WORKSPACE, dtype=torch.uint8, device=device)
        self._wrappers: list[BatchMLAPagedAttentionWrapper] = []
        self._copied: torch.cuda.Event | None = None
        self._buffer = torch.zeros(0, dtype=torch.int32, device=device)
        if request.graph:
            size = request.limits.max_tokens * (WINDOW + self._attended(request.limits.max_model_len))
            self._buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._prepared = -1
        self._planned = torch.zeros(1, dtype=torch.int32, device=device)
        self.attends: torch.Tensor
        self._places: tuple[Place, Place] | None = None
        self._made: tuple[tuple[Place, Place], bool] | None = None
        self._planned_captured = False

    def prepare(self, step: Step) -> None:
        """Divide the work of a step; this waits until the division of the last one has been copied."""
        if self._copied is not None:
            self._copied.synchronize()  # FlashInfer copies it from a buffer that it fills anew
        table = self._table(step)
        width = table.shape[1]
        counts = self._counts(step, width - WINDOW)
        self._planned.fill_(step.num_tokens)  # a graph may have room for more of them
        turns = _turns(step.num_tokens)
        while len(self._wrappers) < len(turns):
            self._wrappers.append(BatchMLAPagedAttentionWrapper(self._workspace, backend="fa3"))
        # A graph may have more turns than this step: those get one query, which attends nothing.
        nothing = torch.zeros(1, dtype=torch.int32)
        for number, wrapper in enumerate(self._wrappers):
            numbers, own, apart = self._buffer[:1], nothing, 0
            if number < len(turns):
                numbers, own, apart = table[turns[number]].flatten(), counts[turns[number]], width
            starts = torch.arange(len(own) + 1, dtype=torch.int32)
            wrapper.plan(
                qo_indptr=starts,
                kv_indptr=starts * apart,
                kv_indices=numbers,
                kv_len_arr=own,
                num_heads=self._request.num_heads,
                head_dim_ckv=self._request.model.head_dim,
                head_dim_kpe=0,
                page_size=1,
                causal=False,
                sm_scale=self._request.model.softmax_scale,
                q_data_type=torch.bfloat16,
                kv_data_type=self._dtype,
            )
        self._prepared = step.num_tokens
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def plan(self, step: Step) -> None:
        """The step's table where layers choose nothing, for pools that lie as those of the first layer."""
        self._made, self._planned_captured = None, self._captures()
        if self.kind.select != "top_k" and self._places is not None:
            self._make(None, step, self._places)
            self._made = self._places, self._planned_captured

    def runs(
        self, caches: LayerCaches, selected: torch.Tensor | None, step: Step
    ) -> Iterator[tuple[slice, BatchMLAPagedAttentionWrapper, torch.Tensor]]:
        """Query tokens, who attends them, and the rows that its numbers count, `[1, 1, 512]` for the first.

        The table is that of the plan, or of the layer before this one, where pools lie alike and both are
        captured like this, or are not.
        """
        rows, places = _one_space(caches)
        captured = self._captures()
        assert self._prepared >= 0, "A step was planned that dsv4_prepare_step has not seen."
        if selected is not None or self._made != (places, captured):
            self._make(selected, step, places)
            self._places = self._places or places
            shared = selected is None and captured == self._planned_captured
            self._made = (places, captured) if shared else None
        for wrapper, tokens in zip(self._wrappers, _turns(step.num_tokens), strict=False):
            yield tokens, wrapper, rows

    def _make(self, selected: torch.Tensor | None, step: Step, places: tuple[Place, Place]) -> None:
        entries = step.compressed[self.kind.name] if self.kind.ratio is not None else None
        self.attends = torch.empty(step.num_tokens, dtype=torch.int32, device=self._device)
        self._numbers.row_numbers(
            *(step.positions, step.token_to_request, step.window, entries, selected, places),
            *(WINDOW, self.kind.ratio, self._planned, self._table(step), self.attends),
        )

    def _counts(self, step: Step, most: int) -> torch.Tensor:
        """`[tokens]` int32 on the host: rows that each query attends; none of padding."""
        assert step.host_lengths is not None  # or the request would have been refused
        query, total = torch.tensor([step.host_lengths.query, step.host_lengths.total], dtype=torch.int64)
        begin = query.cumsum(0) - query
        own = torch.arange(int(query.sum())) + (total - query - begin).repeat_interleave(query)
        positions = torch.nn.functional.pad(own, (0, step.num_tokens - len(own)), value=-1)
        window, *entries = ops.query_lengths(positions, WINDOW, self.kind.ratio, most)
        return window + entries[1] if entries else window

    def _attended(self, longest: int) -> int:
        """Entries that a query of so long a context attends at most."""
        visible = self.kind.visible_entries(longest)
        return min(visible, self._request.model.index_topk) if self.kind.select == "top_k" else visible

    def _table(self, step: Step) -> torch.Tensor:
        """`[tokens, width]` int32: numbers of rows; as wide in all steps where graphs have to last."""
        assert step.host_lengths is not None
        graph = self._request.graph
        longest = step.limits.max_model_len if graph else max(step.host_lengths.total, default=0)
        width = WINDOW + self._attended(longest)
        count = step.num_tokens * width
        if len(self._buffer) < max(count, 1):
            self._buffer = torch.zeros(max(count, 1), dtype=torch.int32, device=self._device)
        return self._buffer[:count].view(step.num_tokens, width)

    def _captures(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, eq=False)
class Unfinished:
    """A private output: heads, and what they are to be multiplied with.

    Attributes:
        out: `[tokens, heads, 512]` bf16.
        shares: `[tokens, heads]` fp32; None where heads are what they are to be.
    """

    out: torch.Tensor
    shares: torch.Tensor | None = None


class Layer:
    """One layer's scales, sinks and output projection."""

    def __init__(
        self, layer: LayerSpec, plan: LayerPlan, weights: LayerWeights, device: torch.device
    ) -> None:
        self.layer, self.scales = layer, weights.scales
        self._sinks = weights["attn_sink"].data.float()
        _, self._finish = own_operations(plan)
        self._projection = OutputProjection(
            layer, weights, core_operations(plan), deep_gemm=bool(plan.projection_dtype)
        )
        self.compressors = None
        if "compress" in plan.own_ops:
            self.compressors = Compressors(layer, weights, core_operations(plan), device)
        self._private = plan.output.format == "private"
        self._fused = self._private and self._projection.product == "deepgemm"

    def forward_mqa(
        self,
        q: torch.Tensor,
        caches: LayerCaches,
        selected: torch.Tensor | None,
        step: Step,
        kind_state: SharedStep,
        want_lse: bool,
        apply_sink: bool,
    ) -> AttentionOutput:
        """Attend over the window and the selected entries, or all of them; the sink comes afterwards."""
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        fp8 = caches.window.pool.dtype == torch.float8_e4m3fn
        kv, scales = (self.scales.kv, {"ckv_scale": 1.0, "kpe_scale": 1.0}) if fp8 else (1.0, {})
        no_query = q[..., :0]
        for tokens, wrapper, rows in kind_state.runs(caches, selected, step):
            # FlashInfer keeps the plan's scale, and rounds that of rows to bf16: this is a layer's, exactly.
            wrapper._sm_scale = self.layer.model.softmax_scale * kv
            wrapper.run(
                *(q[tokens], no_query[tokens], rows, rows[..., :0]),
                out=out[tokens],
                lse=lse[tokens],
                return_lse=True,
                return_lse_base_on_e=True,
                **scales,
            )
        sinks, attends = self._sinks if apply_sink else None, kind_state.attends
        if self._fused and not want_lse:
            shares = self._finish.sink_shares(lse, attends, sinks, kv)
            return AttentionOutput(Unfinished(out, shares))
        self._finish.apply_sink(out, lse, attends, sinks, kv)
        return AttentionOutput(Unfinished(out) if self._private else out, lse if want_lse else None)

    def o_proj(self, attention: torch.Tensor | Unfinished, positions: torch.Tensor) -> torch.Tensor:
        """Rotate back and project to `[tokens, hidden_size]`."""
        if isinstance(attention, Unfinished):
            return self._projection(attention.out, positions, attention.shares)
        return self._projection(attention, positions)

    def describe(self) -> dict[str, Any]:
        """Kernels, versions of their libraries, scales, and the bytes of the prepared weights."""
        names = (library.DISTRIBUTION, *libraries.DEEP_GEMM, "torch")
        versions = {name: found for name in names if (found := libraries.installed(name))}
        own = {"o_proj": self._projection.product, "prepared_bytes": self._projection.nbytes}
        return {"kernel": "fa3", **versions, "scales": vars(self.scales), **own}


def _turns(count: int) -> list[slice]:
    """Query tokens that one plan holds."""
    return [slice(begin, min(begin + MOST_ROWS, count)) for begin in range(0, count, MOST_ROWS)]


def _one_space(caches: LayerCaches) -> tuple[torch.Tensor, tuple[Place, Place]]:
    """Rows of both pools by number, from the window's first byte on: numbers are signed and go anywhere.

    Returns:
        `[1, 1, 512]`, the row of number 0, whose page stride is the unit; and where both pools lie.

    Raises:
        ConfigError: Rows are apart by what the kernel cannot load, or further than numbers reach.
    """
    window, further = caches.window, caches.compressed or caches.window
    size = window.pool.element_size()
    row = window.pool.stride(1) * size
    distance = further.pool.data_ptr() - window.pool.data_ptr()
    spans = [distance, row, *(own.page_stride_bytes for own in (window, further) if own.num_pages > 1)]
    unit = math.gcd(UNITS[1], *spans)
    reach = abs(distance) + max(own.num_pages * own.page_stride_bytes for own in (window, further))
    if unit < UNITS[0] or reach // unit >= 1 << 31:
        raise ConfigError(
            f"Pools whose pages are {window.page_stride_bytes:,} and {further.page_stride_bytes:,} bytes "
            f"apart, and they themselves {abs(distance):,}, cannot be counted in int32 rows of {UNITS[0]} "
            f"bytes or more; align pools and pages to {UNITS[1]} bytes, or use backend=triton."
        )
    places = (
        Place(0, window.page_stride_bytes // unit, row // unit),
        Place(distance // unit, further.page_stride_bytes // unit, row // unit),
    )
    return window.pool.as_strided((1, 1, window.pool.shape[2]), (unit // size, unit // size, 1)), places
