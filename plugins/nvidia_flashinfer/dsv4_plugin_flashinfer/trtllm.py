"""What the backend keeps for a layer, and for a step of all layers of one kind, for TRTLLM-gen's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import flashinfer.mla
import torch

from dsv4_plugin_flashinfer import library
from dsv4_plugin_flashinfer.compress.prepared import Compressors
from dsv4_plugin_flashinfer.plugin import WORKSPACE
from dsv4core import libraries
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
from dsv4core.attention import core_operations
from dsv4core.kvcache import KVCache
from dsv4core.ops.o_proj.prepared import OutputProjection

Pages = tuple[tuple[int, int], tuple[int, int]]
"""Of both pools: rows a page, and from one page to the next."""


@dataclass(frozen=True, eq=False)
class Launch:
    """Requests whose queries are attended together.

    Attributes:
        tokens: Their query tokens.
        starts: `[requests + 1]` int32: where each one's begin among them.
        lengths: `[requests]` int32: tokens of each request.
        longest: No request has more query tokens.
    """

    tokens: slice
    starts: torch.Tensor
    lengths: torch.Tensor
    longest: int


class SharedStep:
    """Index tables and launches, which each plan makes anew."""

    def __init__(
        self, request: Request, kind: LayerKind, plan: LayerPlan, split: bool, device: torch.device
    ) -> None:
        """Keep what does not change.

        Args:
            request: What was selected for.
            kind: The layers' kind.
            plan: Their plan.
            split: Whether decodes and prefills are launched apart.
            device: Where.
        """
        self.kind, self._request, self._split, self._device = kind, request, split, device
        self._operations = core_operations(plan)
        self.launches: Sequence[Launch] = ()
        self.window: torch.Tensor
        self.entries: torch.Tensor | None = None
        self.shared: dict[Pages, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pages: Pages | None = None
        self._planned_captured = False
        # Made at once: within a capture every replay would fill them with zeros.
        self._workspaces = {captured: _workspace(device, captured) for captured in (False, True)}

    def plan(self, step: Step) -> None:
        """The slots of one step, and its table for pages that lie as those of the first layer."""
        self.shared.clear()
        self._planned_captured = self._captures()
        self.launches = tuple(self._launches(step))
        window, seen = step.window, self._request.model.sliding_window
        place = (step.token_to_request, window.block_table, window.page_size)
        self.window = self._operations.window_slots(step.positions, *place, seen)
        if self.kind.select == "all":
            assert self.kind.ratio is not None
            entries, visible = step.compressed[self.kind.name], (step.positions + 1) // self.kind.ratio
            longest = step.limits.max_model_len
            if step.host_lengths is not None and not self._request.graph:
                longest = max(step.host_lengths.total, default=0)
            width = max(4, -(-self.kind.visible_entries(longest) // 4) * 4)
            place = (step.token_to_request, entries.block_table, entries.page_size)
            self.entries = self._operations.visible_slots(visible, *place, width)
        if self.kind.select != "top_k":
            further = window if self.kind.ratio is None else step.compressed[self.kind.name]
            tight = (window.page_size, window.page_size), (further.page_size, further.page_size)
            pages = self._pages or tight
            self.shared[pages] = self._operations.mixed_sparse_indices(self.window, self.entries, *pages)

    def _launches(self, step: Step) -> list[Launch]:
        """Decodes, then prefills, in one launch each."""
        lengths = step.seq_lens.maximum(step.query_start_loc.diff())
        decodes, tokens = step.num_decode_requests, step.num_decode_tokens
        longest = step.limits.max_query_len
        if step.host_lengths is not None and not self._request.graph:
            longest = max(step.host_lengths.query, default=1)
        if step.num_tokens == 0:
            return []
        if not self._split or tokens in (0, step.num_tokens):
            most = self._request.decode_query_len if decodes == step.num_requests else longest
            return [Launch(slice(step.num_tokens), step.query_start_loc, lengths, max(1, most))]
        first = Launch(
            slice(tokens),
            step.query_start_loc[: decodes + 1],
            lengths[:decodes],
            self._request.decode_query_len,
        )
        rest = Launch(
            slice(tokens, step.num_tokens),
            step.query_start_loc[decodes:] - step.query_start_loc[decodes],
            lengths[decodes:],
            max(1, longest),
        )
        return [first, rest]

    def table(
        self, caches: LayerCaches, selected: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that queries attend, and how many: the step's, unless layers choose or pages lie otherwise.

        What was made eagerly is nothing for a graph, and the other way round.
        """
        pages = _page(caches.window), _page(caches.compressed or caches.window)
        keeps = selected is None and self._captures() == self._planned_captured
        if keeps and pages in self.shared:
            return self.shared[pages]
        entries = self.entries
        if selected is not None:
            own = step.compressed[self.kind.name]
            place = (step.token_to_request, own.block_table, own.page_size)
            entries = self._operations.entry_slots(selected, *place)
        made: tuple[torch.Tensor, torch.Tensor] = self._operations.mixed_sparse_indices(
            self.window, entries, *pages
        )
        if selected is None:
            self._pages = self._pages or pages
        if keeps:
            self.shared[pages] = made
        return made

    def workspace(self) -> torch.Tensor:
        """Scratch: eager launches and captured ones have their own, as they may run at once."""
        return self._workspaces[self._captures()]

    def _captures(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@lru_cache
def _workspace(device: torch.device, captured: bool) -> torch.Tensor:
    """One of a device for launches that are captured, and one for the others."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


class Layer:
    """One layer's scales, sinks and output projection."""

    def __init__(
        self, layer: LayerSpec, plan: LayerPlan, weights: LayerWeights, device: torch.device
    ) -> None:
        self.layer, self.plan, self.scales = layer, plan, weights.scales
        fp8 = plan.q_dtype.startswith("float8")
        q, kv = (self.scales.q, self.scales.kv) if fp8 else (1.0, 1.0)
        # Numbers, never tensors: with those FlashInfer multiplies by log2(e), and takes another kernel.
        self._score_scale, self._value_scale = layer.model.softmax_scale * q * kv, kv
        self._sinks = torch.full((plan.padded_q_heads,), float("-inf"), device=device)
        self._sinks[: layer.num_heads] = weights["attn_sink"].data.float()
        self._projection = OutputProjection(
            layer, weights, core_operations(plan), deep_gemm=bool(plan.projection_dtype)
        )
        self.compressors = None
        if "compress" in plan.own_ops:
            self.compressors = Compressors(layer, weights, core_operations(plan), device)

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
        """Attend over the window and the selected entries, or all of them; without a log-sum-exp."""
        table, counts = kind_state.table(caches, selected, step)
        out = torch.zeros(q.shape, dtype=torch.bfloat16, device=q.device)  # rows of padding stay zero
        window, compressed = caches.window, caches.compressed or caches.window
        more: dict[str, Any] = {}
        if library.counts_storage(flashinfer.mla):
            more[library.OFFSETS] = True
        for launch in kind_state.launches:
            flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4(
                query=q[launch.tokens],
                swa_kv_cache=_rows(window),
                workspace_buffer=kind_state.workspace(),
                sparse_indices=table[launch.tokens],
                compressed_kv_cache=_rows(compressed),
                sparse_topk_lens=counts[launch.tokens],
                seq_lens=launch.lengths,
                out=out[launch.tokens],
                bmm1_scale=self._score_scale,
                bmm2_scale=self._value_scale,
                sinks=self._sinks if apply_sink else None,
                kv_layout="NHD",
                cum_seq_lens_q=launch.starts,
                max_q_len=launch.longest,
                backend="trtllm-gen",
                **more,
            )
        return AttentionOutput(out)

    def o_proj(self, attention: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate back and project to `[tokens, hidden_size]`."""
        return self._projection(attention[:, : self.layer.num_heads], positions)

    def describe(self) -> dict[str, Any]:
        """Kernels, versions of their libraries, scales, and the bytes of the prepared weights."""
        names = (library.DISTRIBUTION, *libraries.DEEP_GEMM, "torch")
        versions = {name: found for name in names if (found := libraries.installed(name))}
        own = {"o_proj": self._projection.product, "prepared_bytes": self._projection.nbytes}
        return {"kernel": "trtllm-gen", **versions, "scales": vars(self.scales), **own}


def _rows(cache: KVCache) -> torch.Tensor:
    """A pool as TRTLLM-gen takes it, `[pages, page_size, 1, 512]`."""
    return cache.pool[:, :, None]


def _page(cache: KVCache) -> tuple[int, int]:
    """Rows a page, and from one page to the next.

    Raises:
        ConfigError: Pages are apart by no whole number of rows, or at all where FlashInfer takes none of it.
    """
    if cache.num_pages == 1:
        return cache.page_size, cache.page_size
    span, rest = divmod(cache.pool.stride(0), cache.pool.stride(1))
    if rest or (span != cache.page_size and not library.counts_storage(flashinfer.mla)):
        wanted = "whole rows" if rest else f"no more than their {cache.page_size} rows"
        raise ConfigError(
            f"Pages are {cache.page_stride_bytes:,} bytes apart, and FlashInfer reads pages that are apart "
            f"by {wanted}; give such pools, or use backend=triton."
        )
    return cache.page_size, span
