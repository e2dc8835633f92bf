"""What the backend keeps for a layer, and for a step of all layers of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from dsv4_plugin_flashmla import calls, library
from dsv4_plugin_flashmla.calls import Pool
from dsv4_plugin_flashmla.plugin import MOST_ROWS, scores_by_deep_gemm
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
from dsv4core.ops.indexer.prompts import Prompt, prompts, score_prompts
from dsv4core.ops.o_proj.prepared import OutputProjection
from dsv4core.step.gathered import Chunk, chunks

LEAST_QUERIES = 128
"""Of a prompt that DeepGEMM scores: all of its keys are brought side by side for them. With 512 that takes
0.56 of the core's time; with fewer it is not measured."""


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
        return prompts(step, self.kind, tokens, LEAST_QUERIES) if self._scores else []

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
        table = step.compressed[self.layer.kind.name].block_table

        def score(prompt: Prompt, rows: slice) -> torch.Tensor:
            assert caches.index is not None
            pages = table[prompt.request, : -(-prompt.entries // deepgemm.PAGE_SIZE)]
            return deepgemm.prompt_logits(q[rows], weights[rows], caches.index, pages, visible[rows])

        def others(rows: slice, there: slice) -> torch.Tensor:
            assert caches.index is not None
            return self._core_logits(q[rows], weights[rows], visible[rows], there, width, caches.index, step)

        return score_prompts(kind_state.prompts(tokens, step), tokens, step, len(q), width, score, others)

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
        prefill = partial(calls.prefill, scale=scale, sinks=sinks)
        for chunk in kind_state.chunks:
            window = self.layer.model.sliding_window
            attended = chunk.attend(q, caches, selected, window, prefill, self._operations)
            parts += ((tokens, *own) for tokens, own in attended)
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
