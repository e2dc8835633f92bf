"""What the backend keeps for a layer, and for a step of all layers of one kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dsv4_plugin_rocm_aiter import calls, library, ragged
from dsv4_plugin_rocm_aiter.calls import DECODES, NO_SINK, PREFILLS, Pool
from dsv4_plugin_rocm_aiter.plugin import MOST_QUERIES, Plan
from dsv4_plugin_rocm_aiter.projection import projection
from dsv4_plugin_rocm_aiter.ragged import RaggedLists
from dsv4_plugin_rocm_aiter.routes import Symbol
from dsv4core.api import AttentionOutput, LayerCaches, LayerKind, LayerSpec, LayerWeights, Request, Step
from dsv4core.api.kvcache import round_up
from dsv4core.attention import core_operations
from dsv4core.ops.indexer.prompts import Prompt, prompts, score_prompts
from dsv4core.ops.sparse_mla import Rows
from dsv4core.step.gathered import Chunk, chunks

Lists = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int, RaggedLists], RaggedLists]


def list_writer(plan: Plan) -> Lists:
    """`ragged_lists` as the core does its operations: the definition, or the kernel."""
    if plan.core_ops == "torch":
        return ragged.ragged_lists
    from dsv4_plugin_rocm_aiter.ragged.triton import ragged_lists

    return ragged_lists


class SharedStep:
    """Tables of slots of all queries, and lists of them for AITER's decode, which each plan makes anew.

    The core's kernels read the tables: where AITER has no route, and where a log-sum-exp is wanted, which
    AITER does not give.
    """

    def __init__(self, request: Request, kind: LayerKind, plan: Plan, device: torch.device) -> None:
        """Keep what does not change; where graphs have to last, make the lists' buffers."""
        self.kind, self._request = kind, request
        self.decode, self._prefill = plan.symbol("decode"), plan.symbol("prefill")
        self._operations, self._lists, self._device = core_operations(plan), list_writer(plan), device
        self._requests = torch.arange(request.limits.max_requests, dtype=torch.int32, device=device)
        self._window_room: RaggedLists | None = None
        self._entry_room: RaggedLists | None = None
        if request.graph and self.decode is not None:
            most = request.limits.max_tokens
            self._window_room = RaggedLists.empty(most, request.model.sliding_window, device)
            if kind.ratio is not None:
                self._entry_room = RaggedLists.empty(most, self._most_entries(None), device)
        self.window: torch.Tensor
        self.window_lengths: torch.Tensor
        self.entries: torch.Tensor | None = None
        self.entry_lengths: torch.Tensor | None = None
        self.window_lists: RaggedLists | None = None
        self.entry_lists: RaggedLists | None = None
        self.chunks: Sequence[Chunk] = ()
        self.in_place = slice(0)

    def plan(self, step: Step) -> None:
        """The tables and lists of one step."""
        self.chunks = tuple(chunks(step, self.kind, self._request)) if self._gathers(step) else ()
        self.in_place = slice(step.num_decode_tokens if self.chunks else step.num_tokens)
        seen, table, width = self._request.model.sliding_window, step.window, self._most_entries(step)
        place = (step.token_to_request, table.block_table, table.page_size)
        self.window = self._operations.window_slots(step.positions, *place, seen)
        self.window_lengths, *entries = self._operations.query_lengths(
            step.positions, seen, self.kind.ratio, width
        )
        if entries:
            _, self.entry_lengths = entries
        if self.kind.select == "all":
            assert self.kind.ratio is not None
            table, known = step.compressed[self.kind.name], step.seq_lens // self.kind.ratio
            place = (self._requests[: step.num_requests], table.block_table, table.page_size)
            self.entries = self._operations.visible_slots(known, *place, width)
        if self.decode is not None:
            self._plan_lists(step, self.decode)

    def _plan_lists(self, step: Step, symbol: Symbol) -> None:
        own, least = self.in_place, int(not symbol.writes_empty_rows)
        self._window_room = self._room(self._window_room, own.stop, self.window.shape[1])
        lengths = self.window_lengths[own]
        self.window_lists = self._lists(self.window[own], lengths, None, least, self._window_room)
        if self.entries is not None and self.entry_lengths is not None:
            self._entry_room = self._room(self._entry_room, own.stop, self.entries.shape[1])
            lengths, owners = self.entry_lengths[own], step.token_to_request[own]
            self.entry_lists = self._lists(self.entries, lengths, owners, least, self._entry_room)

    def chosen_lists(self, slots: torch.Tensor) -> RaggedLists:
        """The lists of entries that one layer's queries in place have chosen, by their slots."""
        assert self.decode is not None
        self._entry_room = self._room(self._entry_room, len(slots), slots.shape[1])
        return self._lists(slots, None, None, int(not self.decode.writes_empty_rows), self._entry_room)

    def chosen(self, selected: torch.Tensor, step: Step, tokens: slice) -> torch.Tensor:
        """Slots of the entries that some queries have chosen in one layer."""
        table = step.compressed[self.kind.name]
        place = (step.token_to_request[tokens], table.block_table, table.page_size)
        slots: torch.Tensor = self._operations.entry_slots(selected[tokens], *place)
        return slots

    def _gathers(self, step: Step) -> bool:
        """Whether AITER attends this step's prefills, over gathered rows."""
        symbol = self._prefill
        fresh = step.num_tokens - step.num_decode_tokens
        return symbol is not None and step.host_lengths is not None and fresh >= symbol.least_queries

    def _room(self, room: RaggedLists | None, tokens: int, width: int) -> RaggedLists:
        """A buffer for so many lists. One of a graph has had room for all from the beginning."""
        if room is None or len(room.starts) <= tokens or len(room.indices) < tokens * width:
            return RaggedLists.empty(tokens, width, self._device)
        return room

    def _most_entries(self, step: Step | None) -> int:
        """Entries that a query attends at most: of a step, where no graph has to last."""
        if self.kind.select == "top_k":
            return self._request.model.index_topk
        longest = self._request.limits.max_model_len
        if step is not None and step.host_lengths is not None and not self._request.graph:
            longest = max(step.host_lengths.total, default=0)
        return round_up(self.kind.visible_entries(longest), 16)  # kernels are compiled for its divisors


@dataclass(frozen=True, eq=False)
class Call:
    """What attention of one layer is called with in a step.

    Attributes:
        q: `[tokens, heads, 512]`.
        caches: The layer's.
        selected: `[tokens, k]` entries that each query attends; None for all of them.
        step: The step.
        shared: What layers of the kind share in it.
        apply_sink: Whether sinks take their share.
    """

    q: torch.Tensor
    caches: LayerCaches
    selected: torch.Tensor | None
    step: Step
    shared: SharedStep
    apply_sink: bool


class Layer:
    """One layer's sinks and output projection."""

    def __init__(self, layer: LayerSpec, plan: Plan, weights: LayerWeights, device: torch.device) -> None:
        self.layer, self.plan = layer, plan
        self._scores, self._prefills = plan.symbol("index_logits"), plan.symbol("prefill")
        self._operations, self._lists = core_operations(plan), list_writer(plan)
        self._sinks = torch.full((plan.padded_q_heads,), float("-inf"), device=device)
        self._sinks[: layer.num_heads] = weights["attn_sink"].data.float()
        self._finite_sinks = self._sinks.clamp_min(NO_SINK)
        self._no_sinks = torch.full_like(self._sinks, NO_SINK)
        self._projection = projection(layer, weights, plan)

    def index_logits(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        visible: torch.Tensor,
        tokens: slice,
        width: int,
        caches: LayerCaches,
        step: Step,
    ) -> torch.Tensor:
        """Scores of the entries that these tokens see."""
        keys, table = caches.index, step.compressed[self.layer.kind.name]
        symbol = self._scores
        assert keys is not None
        assert symbol is not None

        def score(prompt: Prompt, rows: slice) -> torch.Tensor:
            pages = table.block_table[prompt.request, : -(-prompt.entries // table.page_size)]
            return calls.prompt_logits(q[rows], weights[rows], keys, pages, visible[rows])

        def others(rows: slice, there: slice) -> torch.Tensor:
            own = q[rows], weights[rows], keys, table, step.token_to_request[there], visible[rows], width
            scores: torch.Tensor = self._operations.index_logits(*own)
            return scores

        found = prompts(step, self.layer.kind, tokens, symbol.least_queries)
        return score_prompts(found, tokens, step, len(q), width, score, others)

    def index_topk(self, logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """The best of them."""
        return calls.top_k(logits, visible, self.layer.model.index_topk)

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
        call = Call(q, caches, selected, step, kind_state, apply_sink)
        if want_lse or (kind_state.decode is None and not kind_state.chunks):
            return AttentionOutput(*self._by_core(call, slice(step.num_tokens), want_lse))
        parts = self._in_place(call)
        prefill = partial(self._prefill, sinks=self._given_sinks(call))
        for chunk in kind_state.chunks:
            window = self.layer.model.sliding_window
            parts += chunk.attend(q, caches, selected, window, prefill, self._operations)
        return AttentionOutput(_whole(q, parts))

    def _given_sinks(self, call: Call) -> torch.Tensor:
        """Sinks for AITER's kernels, which take some in any case."""
        return self._finite_sinks if call.apply_sink else self._no_sinks

    def _in_place(self, call: Call) -> list[tuple[slice, torch.Tensor]]:
        """Queries that read rows in place, some at a time."""
        front, symbol = call.shared.in_place, call.shared.decode
        if not front.stop:
            return []
        if symbol is None:
            return [(front, self._by_core(call, front, want_lse=False)[0])]
        assert call.shared.window_lists is not None
        pools = [Pool(call.caches.window, call.shared.window_lists)]
        if call.caches.compressed is not None:
            lists = call.shared.entry_lists
            if call.selected is not None:
                lists = call.shared.chosen_lists(call.shared.chosen(call.selected, call.step, front))
            assert lists is not None
            pools.append(Pool(call.caches.compressed, lists))
        attend, sinks, parts = DECODES[symbol.name], self._given_sinks(call), []
        for begin in range(0, front.stop, MOST_QUERIES):
            tokens = slice(begin, min(begin + MOST_QUERIES, front.stop))
            own = [Pool(pool.cache, pool.lists.of(tokens)) for pool in pools]
            parts.append((tokens, attend(symbol, call.q[tokens], own, self.layer.model.softmax_scale, sinks)))
        return parts

    def _prefill(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Queries of prefills over gathered rows, some at a time."""
        symbol = self._prefills
        assert symbol is not None
        attend, scale = PREFILLS[symbol.name], self.layer.model.softmax_scale
        lists = self._lists(table, lengths, None, 0, RaggedLists.empty(len(table), table.shape[1], q.device))
        turns = (slice(begin, begin + MOST_QUERIES) for begin in range(0, len(q), MOST_QUERIES))
        parts = [attend(q[turn], rows, lists.of(turn), scale, sinks) for turn in turns]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _by_core(self, call: Call, tokens: slice, want_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The core's kernel, which reads each pool in its flavour of FP8."""
        shared, caches, step = call.shared, call.caches, call.step
        rows = [Rows(caches.window, shared.window[tokens], shared.window_lengths[tokens])]
        if caches.compressed is not None and shared.entry_lengths is not None:
            lengths = shared.entry_lengths[tokens]
            if call.selected is not None:
                rows.append(Rows(caches.compressed, shared.chosen(call.selected, step, tokens), lengths))
            else:
                assert shared.entries is not None
                rows.append(Rows(caches.compressed, shared.entries, lengths, step.token_to_request[tokens]))
        sinks, scale = self._sinks if call.apply_sink else None, self.layer.model.softmax_scale
        out, lse = self._operations.sparse_mla(call.q[tokens], rows, scale, sinks, want_lse)
        return out, None if lse is None else lse[:, : self.layer.num_heads]

    def o_proj(self, attention: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate back and project to `[tokens, hidden_size]`."""
        return self._projection(attention[:, : self.layer.num_heads], positions)

    def describe(self) -> dict[str, Any]:
        """Routes, versions of the libraries, and the bytes of the prepared weights."""
        aiter = library.found("static")
        versions = {"amd-aiter": aiter.version, "flydsl": aiter.flydsl, "triton": aiter.triton}
        own = {"o_proj": self._projection.product, "prepared_bytes": self._projection.nbytes}
        routes = dict(self.plan.routes)
        return {"kernel": "aiter", **versions, "torch": torch.__version__, "routes": routes, **own}


def _whole(q: torch.Tensor, parts: Sequence[tuple[slice, torch.Tensor]]) -> torch.Tensor:
    """One part is returned as it is; several are copied side by side, and rows of padding get zeros."""
    if len(parts) == 1 and parts[0][0] == slice(0, len(q)):
        return parts[0][1]
    out = torch.zeros_like(q)
    for tokens, own in parts:
        out[tokens] = own
    return out
