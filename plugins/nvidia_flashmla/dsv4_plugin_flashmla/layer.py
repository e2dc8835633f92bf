"""What the backend keeps for a layer, and for a step of all layers of one kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_plugin_flashmla import calls, library
from dsv4_plugin_flashmla.calls import Pool
from dsv4_plugin_flashmla.plugin import MOST_ROWS, scores_by_deep_gemm
from dsv4_plugin_flashmla.prefill import Chunk, chunks
from dsv4core import libraries
from dsv4core.api import (
    AttentionOutput,
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
from dsv4core.ops.indexer import deepgemm
from dsv4core.ops.indexer.deepgemm import ScorePlan
from dsv4core.ops.o_proj.prepared import OutputProjection

LEAST_QUERIES = 128
"""Of a prompt that DeepGEMM scores: all of its keys are brought side by side for them. With 512 that takes
0.56 of the core's time; with fewer it is not measured."""


@dataclass(frozen=True)
class Prompt:
    """Queries of one prefill.

    Attributes:
        tokens: Where they are among those that are looked at.
        request: Their request.
        entries: What the last of them sees, at least 1.
    """

    tokens: slice
    request: int
    entries: int


class SharedStep:
    """Index tables and tile schedules, which a plan makes anew: a schedule of other lengths is a wrong one.

    Queries that read rows in place are those of decodes, and those of prefills where these do not gather.
    """

    def __init__(
        self, request: Request, kind: LayerKind, plan: LayerPlan, gathers: bool, device: torch.device
    ) -> None:
        """Keep what does not change.

        Args:
            request: What was selected for.
            kind: The layers' kind.
            plan: Their plan.
            gathers: Whether prefills gather rows.
            device: Where.
        """
        self.kind, self._request, self._gathers = kind, request, gathers
        self._operations = core_operations(plan)
        self._multiple = 64 if plan.padded_q_heads == 64 else 128
        self._scores = scores_by_deep_gemm(request, kind)
        self._device = device
        self._captured = False
        self.turns: list[tuple[slice, Any]] = []
        self.window: torch.Tensor
        self.window_lengths: torch.Tensor
        self.entries: torch.Tensor | None = None
        self.entry_lengths: torch.Tensor | None = None
        self.chunks: Sequence[Chunk] = ()
        self.scores: ScorePlan | None = None

    def plan(self, step: Step) -> None:
        """The tables and holders of one step."""
        self.chunks = tuple(chunks(step, self.kind, self._request)) if self._gathers else ()
        count = step.num_decode_tokens if self.chunks else step.num_tokens
        bounds = (slice(begin, min(begin + MOST_ROWS, count)) for begin in range(0, count, MOST_ROWS))
        self.turns = [(tokens, calls.schedule()) for tokens in bounds]
        self._captured = self._captures()
        positions, requests, window = step.positions[:count], step.token_to_request[:count], step.window
        seen = self._request.model.sliding_window
        slots = self._operations.window_slots(positions, requests, window.block_table, window.page_size, seen)
        ratio, width = self.kind.ratio, self._most_entries(step)
        self.window_lengths, *entries = self._operations.query_lengths(positions, seen, ratio, width)
        self.window = self.padded(slots)
        if entries:
            visible, self.entry_lengths = entries
            self._plan_entries(step, visible, requests, width)
            self._plan_scores(step, visible, requests)

    def _plan_scores(self, step: Step, visible: torch.Tensor, requests: torch.Tensor) -> None:
        """A step of decodes alone: those of others are scored with the prefills' queries."""
        self.scores = None
        if self._scores and 0 < step.num_tokens == step.num_decode_tokens and self._chooses(step):
            table = step.compressed[self.kind.name].block_table
            self.scores = deepgemm.plan_scores(visible, requests, table)

    def _plan_entries(self, step: Step, visible: torch.Tensor, requests: torch.Tensor, width: int) -> None:
        if self.kind.select == "all":
            table = step.compressed[self.kind.name]
            self.entries = self._operations.visible_slots(
                visible, requests, table.block_table, table.page_size, width
            )

    def _most_entries(self, step: Step) -> int:
        """Entries that a query attends at most; all of them in columns as the kernels take them."""
        if self.kind.select == "top_k":
            return self._request.model.index_topk
        return self._round(self.kind.visible_entries(self._longest(step)))

    def _longest(self, step: Step) -> int:
        """The longest context: of the step where its lengths are known, and no graph has to last."""
        if step.host_lengths is None or self._request.graph:
            return step.limits.max_model_len
        return max(step.host_lengths.total, default=0)

    def prompts(self, tokens: slice, step: Step) -> list[Prompt]:
        """Prefills among these tokens, for DeepGEMM; none in a graph, or where the host has no lengths."""
        if not self._scores or step.host_lengths is None or self._captures():
            return []
        found, begin, lengths = [], 0, step.host_lengths
        start, stop, _ = tokens.indices(step.num_tokens)
        for request, (query, total) in enumerate(zip(lengths.query, lengths.total, strict=True)):
            first, last = max(begin, start), min(begin + query, stop)
            if request >= step.num_decode_requests and last - first >= LEAST_QUERIES:
                own = slice(first - start, last - start)
                seen = self.kind.visible_entries(total - (begin + query - last))
                found.append(Prompt(own, request, max(1, seen)))
            begin += query
        return found

    def schedule(self, shared: Any) -> Any:
        """The schedule of a turn, which the first call behind the plan makes and all layers share.

        Where one of the two is captured and the other is not, each call makes its own: a graph would replay
        a schedule of the lengths that it was captured with.
        """
        return shared if self._captures() == self._captured else calls.schedule()

    def _captures(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _chooses(self, step: Step) -> bool:
        """Whether a query may see more entries than it attends, as the layer decides it."""
        return self.kind.visible_entries(self._longest(step)) > self._request.model.index_topk

    def chosen(self, selected: torch.Tensor, step: Step) -> torch.Tensor:
        """Slots of the entries that queries in place have chosen in one layer."""
        table, count = step.compressed[self.kind.name], len(self.window)
        requests = step.token_to_request[:count]
        slots: torch.Tensor = self._operations.entry_slots(
            selected[:count], requests, table.block_table, table.page_size
        )
        return self.padded(slots)

    def padded(self, slots: torch.Tensor) -> torch.Tensor:
        """As wide as the kernels take it."""
        width = slots.shape[1]
        missing = self._round(width) - width
        return torch.nn.functional.pad(slots, (0, missing), value=-1) if missing else slots

    def _round(self, width: int) -> int:
        return max(1, -(-width // self._multiple)) * self._multiple


class Layer:
    """One layer's sinks, padded, and its output projection."""

    def __init__(
        self, layer: LayerSpec, plan: LayerPlan, weights: LayerWeights, device: torch.device
    ) -> None:
        self.layer, self.plan, self.rope = layer, plan, weights.rope
        self._operations = core_operations(plan)
        self._sinks = torch.full((plan.padded_q_heads,), float("-inf"), device=device)
        self._sinks[: layer.num_heads] = weights["attn_sink"].data.float()
        self._projection = OutputProjection(
            layer, weights, self._operations, deep_gemm=bool(plan.projection_dtype)
        )

    def index_logits(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        visible: torch.Tensor,
        tokens: slice,
        width: int,
        caches: LayerCaches,
        step: Step,
        kind_state: SharedStep,
    ) -> torch.Tensor:
        """Scores of the entries that these tokens see."""
        assert caches.index is not None
        if kind_state.scores is not None and len(q) == step.num_tokens:
            return deepgemm.index_logits(q, weights, caches.index, kind_state.scores, width)
        prompts = kind_state.prompts(tokens, step)
        if not prompts:
            return self._core_logits(q, weights, visible, tokens, width, caches.index, step)
        table = step.compressed[self.layer.kind.name].block_table
        start, _, _ = tokens.indices(step.num_tokens)
        out: torch.Tensor | None = None
        for rows, prompt in _with_gaps(prompts, len(q)):
            own = q[rows], weights[rows]
            if prompt is None:
                there = slice(start + rows.start, start + rows.stop)
                scores = self._core_logits(*own, visible[rows], there, width, caches.index, step)
            else:
                pages = table[prompt.request, : -(-prompt.entries // deepgemm.PAGE_SIZE)]
                scores = deepgemm.prompt_logits(*own, caches.index, pages, visible[rows])
            if rows == slice(0, len(q)) and scores.shape[1] >= width:
                return scores[:, :width]
            if out is None:
                out = q.new_empty(len(q), width, dtype=torch.float32)
            seen = min(width, scores.shape[1])
            out[rows, :seen] = scores[:, :seen]
        assert out is not None
        return out

    def _core_logits(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        visible: torch.Tensor,
        tokens: slice,
        width: int,
        keys: KVCache,
        step: Step,
    ) -> torch.Tensor:
        table, requests = step.compressed[self.layer.kind.name], step.token_to_request[tokens]
        scores: torch.Tensor = self._operations.index_logits(
            q, weights, keys, table, requests, visible, width
        )
        return scores

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
        """Attend over the window and the selected entries, or all of them."""
        sinks, scale = self._sinks if apply_sink else None, self.layer.model.softmax_scale
        parts: list[tuple[slice, torch.Tensor, torch.Tensor]] = []
        pools = self._pools(caches, selected, step, kind_state) if kind_state.turns else []
        for tokens, shared in kind_state.turns:
            own = [Pool(pool.cache, pool.slots[tokens], pool.lengths[tokens]) for pool in pools]
            holder = kind_state.schedule(shared)
            parts.append((tokens, *calls.decode(q[tokens], own, scale, sinks, holder)))
        for chunk in kind_state.chunks:
            window = self.layer.model.sliding_window
            parts += chunk.attend(q, caches, selected, window, scale, sinks, self._operations)
        out, lse = _whole(q, parts)
        return AttentionOutput(out, calls.contract_lse(lse, self.layer.num_heads) if want_lse else None)

    def _pools(
        self, caches: LayerCaches, selected: torch.Tensor | None, step: Step, kind_state: SharedStep
    ) -> list[Pool]:
        pools = [Pool(caches.window, kind_state.window, kind_state.window_lengths)]
        if caches.compressed is not None and kind_state.entry_lengths is not None:
            slots = kind_state.entries if selected is None else kind_state.chosen(selected, step)
            assert slots is not None
            pools.append(Pool(caches.compressed, slots, kind_state.entry_lengths))
        return pools

    def o_proj(self, attention: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate back and project to `[tokens, hidden_size]`."""
        return self._projection(attention[:, : self.layer.num_heads], positions)

    def describe(self) -> dict[str, Any]:
        """Kernels, versions of their libraries, and the bytes of the prepared weights."""
        names = (*library.FLASH_MLA, *libraries.DEEP_GEMM, "torch")
        versions = {name: found for name in names if (found := libraries.installed(name))}
        own = {"o_proj": self._projection.product, "prepared_bytes": self._projection.nbytes}
        return {"kernel": "flash_mla", **versions, **own}


def _with_gaps(prompts: Sequence[Prompt], count: int) -> Iterator[tuple[slice, Prompt | None]]:
    """All of so many queries in their order: those of prompts, and those between them."""
    begin = 0
    for prompt in prompts:
        if begin < prompt.tokens.start:
            yield slice(begin, prompt.tokens.start), None
        yield prompt.tokens, prompt
        begin = prompt.tokens.stop
    if begin < count:
        yield slice(begin, count), None


def _whole(
    q: torch.Tensor, parts: Sequence[tuple[slice, torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One part is returned as it is; several are copied side by side, and rows of padding get zeros."""
    if len(parts) == 1 and parts[0][0] == slice(0, len(q)):
        return parts[0][1], parts[0][2]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], float("inf"), dtype=torch.float32)
    for tokens, own, own_lse in parts:
        out[tokens], lse[tokens] = own, own_lse
    return out, lse
