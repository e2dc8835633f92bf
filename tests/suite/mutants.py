"""Backends that are wrong on purpose: the reference with one thing changed, and the check that has to see."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dsv4core import ops
from dsv4core.api import C4A, C128A, OWN_OPS, SWA, AttentionOutput, LayerCaches, OutputSpec, hookimpl
from dsv4core.backends import reference
from dsv4core.backends.reference_layer import ReferenceLayer, ReferenceStep
from dsv4core.kvcache import KVCache, cache_layout
from dsv4core.model.rope import rotate
from dsv4core.ops.o_proj.prepared import OutputProjection
from dsv4core.testing.suite.test_caches import OTHERS

OUTPUT = "attention output is off"

Hooks: Any = type(
    "Hooks",
    (),
    {name: staticmethod(hook) for name, hook in vars(reference).items() if name.startswith("dsv4_")},
)
"""The reference's hooks as methods, so that a class may replace some."""


class Reference(Hooks):
    """The reference, made of the classes `Layer` and `Step`, with more capabilities and owned operations.

    Attributes:
        capabilities: Declared besides the reference's.
        own: Operations that it owns.
        check: The check that has to fail where a subclass is wrong.
        arguments: Of that check.
        says: What the failure has to say.
    """

    Layer: ClassVar[type[ReferenceLayer]] = ReferenceLayer
    Step: ClassVar[type[ReferenceStep]] = ReferenceStep
    capabilities: ClassVar[frozenset[str]] = frozenset()
    own: ClassVar[frozenset[str]] = frozenset()
    check: ClassVar[str] = ""
    arguments: ClassVar[dict[str, Any]] = {}
    says: ClassVar[str] = OUTPUT

    @hookimpl
    def dsv4_backend_info(self):
        info = reference.dsv4_backend_info()
        return replace(info, capabilities=info.capabilities | self.capabilities)

    @hookimpl
    def dsv4_plan_layer(self, request, layer):
        return replace(reference.dsv4_plan_layer(request, layer), own_ops=self.own)

    @hookimpl
    def dsv4_init_layer_buffers(self, layer, weights):
        state = self.Layer(layer, weights)
        state.weights, state.rope = weights, weights.rope
        return state

    @hookimpl
    def dsv4_init_step_buffers(self, request, kind):
        return self.Step(kind, request.model.sliding_window)

    @hookimpl
    def dsv4_insert_kv(self, layer, state, q, kv, positions, caches, step):
        slots, eps = step.window.slot_mapping, layer.model.rms_norm_eps
        return ops.qk_norm_rope_insert(q, kv, positions, state.rope, caches.window, slots, eps)

    @hookimpl
    def dsv4_compress(self, layer, state, projected, positions, caches, step, target):
        main = target == "compressed"
        prefix = "compressor" if main else "indexer.compressor"
        ape, norm = (state.weights[f"{prefix}.{name}"].data for name in ("ape", "norm"))
        pools = (caches.state, caches.compressed) if main else (caches.index_state, caches.index)
        ops.compress(projected, ape, norm, state.rope, layer.model.rms_norm_eps, layer.kind, step, *pools)

    @hookimpl
    def dsv4_index_logits(self, layer, q, weights, visible, tokens, width, caches, step):
        table = step.compressed[layer.kind.name]
        return ops.index_logits(
            q, weights, caches.index, table, step.token_to_request[tokens], visible, width
        )

    @hookimpl
    def dsv4_index_topk(self, layer, logits, visible):
        return ops.index_topk(logits, visible, layer.model.index_topk)


class Attention(Reference):
    """A backend whose attention differs in `attend`, which gets the pools with the slots to read."""

    check, arguments = "test_every_kind_in_every_phase", {"kind": SWA, "phase": "mixed"}

    def attend(self, q, pools, scale, sinks, want_lse):
        return ops.sparse_mla(q, pools, scale, sinks, want_lse)

    @hookimpl
    def dsv4_forward_mqa(self, layer, state, q, caches, selected, step, kind_state, want_lse, apply_sink):
        pools = [(caches.window, kind_state.window)]
        entries = kind_state.entries if selected is None else kind_state.slots(selected)
        if caches.compressed is not None and entries is not None:
            pools.append((caches.compressed, entries))
        sinks = state.sinks if apply_sink else None
        return AttentionOutput(*self.attend(q, pools, layer.model.softmax_scale, sinks, want_lse))


class ScaleIgnored(Reference):
    """Codes of plain FP8 rows are taken for values."""

    check, arguments = "test_rows_with_a_scale", {"kind": C4A}

    @hookimpl
    def dsv4_forward_mqa(self, state, q, caches, selected, step, kind_state, want_lse, apply_sink):
        plain = {name: own and replace(own, scale=None) for name, own in vars(caches).items()}
        own = (q, LayerCaches(**plain), selected, step, kind_state, want_lse, apply_sink)
        return state.forward_mqa(*own)


class ScaleNotWritten(Reference):
    """Values of plain FP8 rows are stored without being divided."""

    check, own = "test_what_steps_write_elsewhere", OWN_OPS
    arguments: ClassVar[dict[str, Any]] = {"kind": SWA, "changes": OTHERS["fp8_e4m3-scaled"]}
    says = "row part of rows of the window cache"

    @hookimpl
    def dsv4_insert_kv(self, layer, state, q, kv, positions, caches, step):
        plain = replace(caches, window=replace(caches.window, scale=None))
        return super().dsv4_insert_kv(layer, state, q, kv, positions, plain, step)


class SinkIgnored(Attention):
    check, arguments = "test_sinks", {}

    def attend(self, q, pools, scale, sinks, want_lse):
        return super().attend(q, pools, scale, None, want_lse)


class SinkScaled(Attention):
    check, arguments = "test_sinks", {}

    def attend(self, q, pools, scale, sinks, want_lse):
        return super().attend(q, pools, scale, None if sinks is None else sinks * scale, want_lse)


class SinkOfTheNextHead(Attention):
    check, arguments = "test_a_ranks_heads", {}

    def attend(self, q, pools, scale, sinks, want_lse):
        return super().attend(q, pools, scale, None if sinks is None else sinks.roll(1), want_lse)


class SinkAlwaysApplied(Attention):
    check, arguments = "test_sink_left_to_the_host", {"kind": SWA}

    @hookimpl
    def dsv4_forward_mqa(self, layer, state, q, caches, selected, step, kind_state, want_lse):
        return super().dsv4_forward_mqa(layer, state, q, caches, selected, step, kind_state, want_lse, True)


class ScaleWithYarn(Attention):
    """YaRN's magnitude folded into the softmax scale."""

    def attend(self, q, pools, scale, sinks, want_lse):
        return super().attend(q, pools, scale * (0.1 * math.log(16) + 1) ** 2, sinks, want_lse)


class WindowTooShort(Reference):
    check, arguments = "test_lengths_around_every_boundary", {"kind": SWA}

    class Step(ReferenceStep):
        def __init__(self, kind, window):
            super().__init__(kind, window - 1)


class WindowTooLong(Reference):
    check, arguments = "test_lengths_around_every_boundary", {"kind": SWA}

    class Step(ReferenceStep):
        def __init__(self, kind, window):
            super().__init__(kind, window + 1)


class StalePlan(Reference):
    """The first step's plan serves all."""

    check, arguments = "test_steps_follow_each_other", {"kind": SWA, "host_lengths": None}

    class Step(ReferenceStep):
        def plan(self, step):
            if not hasattr(self, "window") or self.window.shape[0] != step.num_tokens:
                super().plan(step)


class StaleReplay(Reference):
    """A step object that was planned before is not planned again, as a graph that captured its lengths."""

    check, arguments = "test_a_graph_replays_other_lengths", {"kind": SWA, "batch": 8}
    capabilities = frozenset({"graph"})

    class Step(ReferenceStep):
        def plan(self, step):
            if getattr(self, "_step", None) is not step:
                super().plan(step)


class OnePlanForAllGroups(Reference):
    """Plans are kept by layer kind, though a host may have several groups of one kind."""

    check, arguments = "test_two_groups_of_block_tables", {"kind": SWA}
    shared: ClassVar[dict[str, ReferenceStep]] = {}

    @hookimpl
    def dsv4_init_step_buffers(self, request, kind):
        window = request.model.sliding_window
        return self.shared.setdefault(kind.name, ReferenceStep(kind, window))


class SinksByKind(Reference):
    """Layers of a kind share what is a layer's own."""

    check, arguments = "test_layers_of_a_kind_share_a_step", {"kind": SWA}
    shared: ClassVar[dict[str, ReferenceLayer]] = {}

    @hookimpl
    def dsv4_init_layer_buffers(self, layer, weights):
        return self.shared.setdefault(layer.kind.name, ReferenceLayer(layer, weights))


class LanesPastTheLength(Reference):
    """All lanes of the table are read, however many entries a query sees."""

    check, arguments = "test_every_kind_in_every_phase", {"kind": C128A, "phase": "decode"}

    class Step(ReferenceStep):
        def _all_entries(self, step):
            longest = replace(step, positions=torch.full_like(step.positions, int(step.positions.max())))
            return super()._all_entries(longest)


class EntryTooEarly(Reference):
    check, arguments = "test_lengths_around_every_boundary", {"kind": C128A}

    class Step(ReferenceStep):
        def _all_entries(self, step):
            return super()._all_entries(replace(step, positions=step.positions + 1))


class EntryTooLate(Reference):
    check, arguments = "test_lengths_around_every_boundary", {"kind": C128A}

    class Step(ReferenceStep):
        def _all_entries(self, step):
            return super()._all_entries(replace(step, positions=step.positions - 1))


class MinusOneIsARow(Reference):
    """-1 among the chosen entries is read as entry 0."""

    check, arguments = "test_widths_of_chosen_entries", {"k": 64}

    class Step(ReferenceStep):
        def slots(self, entries):
            return super().slots(entries.clamp_min(0))


class MaskedByZero(Attention):
    """What must not be read is read and multiplied by zero."""

    check, arguments = "test_what_must_not_be_read_never_matters", {"kind": SWA}

    def attend(self, q, pools, scale, sinks, want_lse):
        out, lse = super().attend(q, pools, scale, sinks, want_lse)
        for cache, slots in pools:
            if (slots < 0).any():
                out = out + 0 * cache.read(torch.zeros(1, dtype=torch.long, device=q.device)).to(out.dtype)
        return out, lse


class NaNOfNothing(Attention):
    """An empty row divides zero by zero."""

    check, arguments = "test_nothing_to_attend_gives_zero", {"kind": SWA}

    def attend(self, q, pools, scale, sinks, want_lse):
        out, lse = super().attend(q, pools, scale, sinks, want_lse)
        empty = torch.stack([(slots < 0).all(-1) for _, slots in pools]).all(0)
        return out.masked_fill(empty[:, None, None] & sinks.isneginf()[None, :, None], math.nan), lse


class OverflowingExponentials(Attention):
    """No maximum is subtracted."""

    check, arguments = "test_large_scores", {}

    def attend(self, q, pools, scale, sinks, want_lse):
        out, _ = super().attend(q, pools, scale, sinks, want_lse)
        _, lse = ops.sparse_mla(q, pools, scale, sinks, True)
        return out * (lse.exp() / lse.exp()).to(out.dtype)[..., None], lse


class ValueWithoutRope(Attention):
    """The rotary dimensions of a key are no part of its value."""

    def attend(self, q, pools, scale, sinks, want_lse):
        out, lse = super().attend(q, pools, scale, sinks, want_lse)
        out[..., -64:] = 0
        return out, lse


class HeadsDropped(Attention):
    """A kernel for 64 heads."""

    check, arguments = "test_head_counts", {"heads": 96}

    def attend(self, q, pools, scale, sinks, want_lse):
        out, lse = super().attend(q, pools, scale, sinks, want_lse)
        out[:, 64:] = 0
        return out, lse


class PageStrideIgnored(Attention):
    check, arguments = "test_strided_pages", {"kind": SWA, "format": "bf16"}

    def attend(self, q, pools, scale, sinks, want_lse):
        tight = []
        for cache, slots in pools:
            strides = (cache.pool.shape[1] * cache.pool.shape[2], cache.pool.shape[2], 1)
            tight.append((KVCache(cache.pool.as_strided(cache.pool.shape, strides), cache.format), slots))
        return super().attend(q, tight, scale, sinks, want_lse)


class OffsetsOf32Bits(Attention):
    check, arguments = "test_pages_beyond_two_gib", {"kind": SWA}

    def attend(self, q, pools, scale, sinks, want_lse):
        wrapped = []
        for cache, slots in pools:
            size = cache.format.bytes_per_token
            offset = (slots.long() * size).int().long()  # negative beyond 2 GiB
            wrapped.append((cache, torch.where(slots < 0, -1, (offset % (1 << 31)) // size)))
        return super().attend(q, wrapped, scale, sinks, want_lse)


class TheNeighboursScale(Attention):
    """Each tile takes the scale of the next one."""

    check, arguments = "test_cache_formats", {"kind": SWA, "format": "fp8_ds_mla"}

    def attend(self, q, pools, scale, sinks, want_lse):
        return super().attend(q, [(_scales_shifted(c), s) for c, s in pools], scale, sinks, want_lse)


def _scales_shifted(cache):
    if cache.format.name != "fp8_ds_mla":
        return cache
    copy = KVCache(cache.pool.clone(), cache.format)
    scales = copy.regions[1]
    scales[..., :7] = scales[..., :7].roll(1, -1)
    return copy


class OneBlockTable(Reference):
    """Every request reads the first one's pages."""

    check, arguments = "test_every_kind_in_every_phase", {"kind": SWA, "phase": "decode"}

    class Step(ReferenceStep):
        def plan(self, step):
            super().plan(replace(step, token_to_request=torch.zeros_like(step.token_to_request)))


class QueriesMixedUp(Reference):
    """The query tokens of a decode are taken in the wrong order."""

    check, arguments = "test_several_query_tokens", {"kind": SWA, "drafts": 1}

    class Step(ReferenceStep):
        def plan(self, step):
            super().plan(step)
            self.window[:2] = self.window[:2].flip(0)


class ChunkFromZero(Reference):
    """A chunk of a prompt is taken for its beginning."""

    check, arguments = "test_every_kind_in_every_phase", {"kind": SWA, "phase": "chunk"}

    class Step(ReferenceStep):
        def plan(self, step):
            start = step.query_start_loc[:-1].long()[step.token_to_request.long()]
            local = torch.arange(step.num_tokens, device=start.device) - start
            super().plan(replace(step, positions=torch.minimum(local, step.positions)))


class TileBoundary(Attention):
    """From the 65th query on, tiles read the table of the first one."""

    check, arguments = "test_long_chunks", {"tokens": 65}

    def attend(self, q, pools, scale, sinks, want_lse):
        row = torch.arange(q.shape[0], device=q.device) % 64
        return super().attend(q, [(cache, slots[row]) for cache, slots in pools], scale, sinks, want_lse)


class EmptyStepFails(Attention):
    check, arguments, says = "test_empty_steps", {"kind": SWA}, "cannot reshape"

    def attend(self, q, pools, scale, sinks, want_lse):
        assert q.shape[0] > 0, "cannot reshape"
        return super().attend(q, pools, scale, sinks, want_lse)


class LseOfBaseTwo(Attention):
    check, arguments, says = "test_log_sum_exp", {"kind": SWA}, "log-sum-exp is off"

    def attend(self, q, pools, scale, sinks, want_lse):
        out, lse = super().attend(q, pools, scale, sinks, True)
        return out, lse / math.log(2)


class LseWithTheSink(Attention):
    check, arguments, says = "test_log_sum_exp", {"kind": SWA}, "log-sum-exp is off"

    def attend(self, q, pools, scale, sinks, want_lse):
        out, lse = super().attend(q, pools, scale, sinks, True)
        return out, torch.logaddexp(lse, sinks)


class LseOfNothingIsPositive(Attention):
    """As FlashMLA returns it."""

    check, arguments, says = "test_log_sum_exp_of_nothing", {}, "inf instead of -inf"

    def attend(self, q, pools, scale, sinks, want_lse):
        out, lse = super().attend(q, pools, scale, sinks, True)
        return out, lse.masked_fill(lse.isneginf(), math.inf)


class NoLse(Attention):
    check, arguments, says = "test_log_sum_exp", {"kind": SWA}, "None was returned"

    def attend(self, q, pools, scale, sinks, want_lse):
        return super().attend(q, pools, scale, sinks, False)


class WritesToQ(Attention):
    check, arguments = "test_arguments_are_left_as_they_are", {"kind": SWA}
    says = "forward_mqa wrote to its q"

    def attend(self, q, pools, scale, sinks, want_lse):
        return super().attend(q.mul_(0.5), pools, 2 * scale, sinks, want_lse)


class AddsToWhatIsOffered(Reference):
    """The offered buffer is taken for zeros."""

    check, arguments = "test_an_offered_buffer", {}

    @hookimpl
    def dsv4_forward_mqa(self, state, q, caches, selected, step, kind_state, out, want_lse, apply_sink):
        output = state.forward_mqa(q, caches, selected, step, kind_state, want_lse, apply_sink)
        return output if out is None else AttentionOutput(out.add_(output.data), output.lse)


class PlanWrites(Reference):
    """A step's lengths are counted down in planning."""

    check, arguments = "test_arguments_are_left_as_they_are", {"kind": SWA}
    says = "plan_step wrote to the step's seq_lens"

    class Step(ReferenceStep):
        def plan(self, step):
            super().plan(step)
            step.seq_lens.sub_(1)


class TablesAreTight(Reference):
    """The row of a block table is found by its number of columns, not by its stride."""

    check, arguments = "test_every_kind_in_every_phase", {"kind": SWA, "phase": "decode"}

    class Step(ReferenceStep):
        def plan(self, step):
            table = step.window.block_table
            tight = table.as_strided(table.shape, (table.shape[1], 1))
            super().plan(replace(step, window=replace(step.window, block_table=tight)))


class TablesAreReadWhole(Reference):
    """Pages that no query reaches are looked up, too."""

    check, arguments = "test_tables_may_hold_anything_that_is_not_reached", {"kind": SWA}
    says = "a page that is none"

    class Step(ReferenceStep):
        def plan(self, step):
            assert int(step.window.block_table[: step.num_requests].max()) < 2**20, "a page that is none"
            super().plan(step)


class PagesOf64(Reference):
    """Every page is taken to have 64 rows."""

    check, arguments = "test_page_sizes", {"kind": SWA, "window": 256, "rows": 256}

    class Step(ReferenceStep):
        def plan(self, step):
            super().plan(replace(step, window=replace(step.window, page_size=64)))


class OddLaneDropped(Reference):
    """Entries are read in pairs."""

    check, arguments = "test_widths", {"entries": 509}

    class Step(ReferenceStep):
        def _all_entries(self, step):
            entries = super()._all_entries(step)
            return entries[:, : entries.shape[1] // 2 * 2]


class HostLengthsMisread(Reference):
    """Where lengths are on the host, all tokens are taken for the first request's."""

    check, arguments = "test_steps_follow_each_other", {"kind": SWA, "host_lengths": True}

    class Step(ReferenceStep):
        def plan(self, step):
            first = torch.zeros_like(step.token_to_request)
            super().plan(step if step.host_lengths is None else replace(step, token_to_request=first))


class LseWithoutSinkOfBaseTwo(Attention):
    """Where the sink is left out, the log-sum-exp is of base 2."""

    check, arguments, says = "test_sink_left_to_the_host", {"kind": SWA}, "log-sum-exp is off"

    def attend(self, q, pools, scale, sinks, want_lse):
        out, lse = super().attend(q, pools, scale, sinks, want_lse)
        return out, lse / math.log(2) if sinks is None and want_lse else lse


class PlaceMatters(Attention):
    """A row rounds otherwise in the second half of a tile."""

    check, arguments = "test_a_rows_output_does_not_depend_on_its_batch", {"kind": SWA}
    capabilities = frozenset({"deterministic"})
    says = "A row's output depends on the other rows of its batch"

    def attend(self, q, pools, scale, sinks, want_lse):
        out, lse = super().attend(q, pools, scale, sinks, want_lse)
        out[4:] *= 1 + 2**-7
        return out, lse


class ProjectionDependsOnTheBatch(Reference):
    """Products are split where there are many rows."""

    check, arguments = "test_a_rows_projection_does_not_depend_on_its_batch", {}
    capabilities = frozenset({"deterministic"})
    says = "A row's projection depends on the other rows of its batch"

    class Layer(ReferenceLayer):
        def o_proj(self, attention, positions):
            out = super().o_proj(attention, positions)
            return out * (1 + 2**-6) if len(positions) > 16 else out


class RoundsAtRandom(Reference):
    """A row that is written again gets other bytes."""

    check, arguments = "test_writing_again_writes_the_same_bytes", {"kind": SWA}
    says = "The same step leaves another window cache"
    own = frozenset({"insert_kv"})

    @hookimpl
    def dsv4_insert_kv(self, layer, state, q, kv, positions, caches, step):
        kv = kv * (1 + 2**-6 * torch.rand(1, dtype=torch.float32).to(kv.dtype))
        return super().dsv4_insert_kv(layer, state, q, kv, positions, caches, step)


class DependsOnTheBatch(Attention):
    """Splits by the number of queries, and so rounds otherwise in another batch."""

    check, arguments = "test_a_rows_output_does_not_depend_on_its_batch", {"kind": SWA}
    capabilities = frozenset({"deterministic"})
    says = "A row's output depends on the other rows of its batch"

    def attend(self, q, pools, scale, sinks, want_lse):
        out, lse = super().attend(q, pools, scale, sinks, want_lse)
        return (out * (1 + 2**-7) if q.shape[0] > 16 else out), lse


class Unrepeatable(Attention):
    check, arguments = "test_the_same_call_gives_the_same_bits", {}
    capabilities = frozenset({"deterministic"})
    says = "The same call gives other bits"

    def attend(self, q, pools, scale, sinks, want_lse):
        out, lse = super().attend(q, pools, scale, sinks, want_lse)
        return out * (1 + 2**-6 * torch.rand(1).to(out.dtype)), lse


class RotatedTwice(Reference):
    check, arguments, says = "test_queries", {"kind": SWA}, "The query is off"
    own = frozenset({"insert_kv"})

    @hookimpl
    def dsv4_insert_kv(self, layer, state, q, kv, positions, caches, step):
        q = super().dsv4_insert_kv(layer, state, q, kv, positions, caches, step)
        return rotate(q, positions, state.rope)


class KeysNotRotated(Reference):
    check, arguments, says = "test_what_steps_write", {"kind": SWA}, "part of rows of the window cache is off"
    own = frozenset({"insert_kv"})

    @hookimpl
    def dsv4_insert_kv(self, layer, state, q, kv, positions, caches, step):
        result = super().dsv4_insert_kv(layer, state, q, kv, positions, caches, step)
        caches.window.write(step.window.slot_mapping, kv)
        return result


class PaddedHeadsNotZero(Reference):
    check, arguments, says = (
        "test_queries",
        {"kind": SWA},
        "Padded heads of q are not exact zeros",
    )
    own = frozenset({"insert_kv"})

    @hookimpl
    def dsv4_plan_layer(self, request, layer):
        plan = super().dsv4_plan_layer(request, layer)
        return replace(plan, padded_q_heads=2 * layer.num_heads, output=OutputSpec(padded=True))

    @hookimpl
    def dsv4_insert_kv(self, layer, state, q, kv, positions, caches, step):
        q = super().dsv4_insert_kv(layer, state, q, kv, positions, caches, step)
        return torch.cat([q, q], dim=1)


class PaddedHeadsProjected(Reference):
    """The projection takes padded heads for real ones, in each group."""

    check, arguments, says = "test_attention_and_projection", {"private": False}, "output projection is off"

    @hookimpl
    def dsv4_plan_layer(self, request, layer):
        plan = super().dsv4_plan_layer(request, layer)
        return replace(plan, padded_q_heads=2 * layer.num_heads, output=OutputSpec(padded=True))

    class Layer(ReferenceLayer):
        def __init__(self, layer, weights):
            super().__init__(layer, weights)
            self.sinks = torch.nn.functional.pad(self.sinks, (0, layer.num_heads), value=-math.inf)

        def o_proj(self, attention, positions):
            return super().o_proj(attention[:, ::2], positions)


class SlotMinusOneWrites(Reference):
    """-1 wraps to the last row."""

    check, arguments = "test_slot_minus_one_stores_nothing", {"kind": SWA}
    says = "A token with slot -1 wrote to the window cache"
    own = frozenset({"insert_kv"})

    @hookimpl
    def dsv4_insert_kv(self, layer, state, q, kv, positions, caches, step):
        last = caches.window.num_pages * caches.window.page_size - 1
        slots = torch.where(step.window.slot_mapping < 0, last, step.window.slot_mapping)
        step = replace(step, window=replace(step.window, slot_mapping=slots))
        return super().dsv4_insert_kv(layer, state, q, kv, positions, caches, step)


class WritesTight(Reference):
    """Pages are taken to lie side by side."""

    check, arguments = "test_writing_to_strided_pages", {"kind": SWA, "format": "bf16"}
    says = "rows of the window cache is off"
    own = frozenset({"insert_kv"})

    @hookimpl
    def dsv4_insert_kv(self, layer, state, q, kv, positions, caches, step):
        pool = caches.window.pool
        tight = pool.as_strided(pool.shape, (pool.shape[1] * pool.shape[2], pool.shape[2], 1))
        caches = replace(caches, window=KVCache(tight, caches.window.format))
        return super().dsv4_insert_kv(layer, state, q, kv, positions, caches, step)


class WritesAt32Bits(Reference):
    """Slots beyond 2 GiB wrap around."""

    check, arguments = "test_writing_beyond_two_gib", {"kind": SWA}
    says = "rows of the window cache is off"
    own = frozenset({"insert_kv"})

    @hookimpl
    def dsv4_insert_kv(self, layer, state, q, kv, positions, caches, step):
        size = caches.window.format.bytes_per_token
        slots = (step.window.slot_mapping * size).int().long() % (1 << 31) // size
        step = replace(step, window=replace(step.window, slot_mapping=slots))
        return super().dsv4_insert_kv(layer, state, q, kv, positions, caches, step)


class ZeroIsNaN(Reference):
    """A row of zeros is divided by its largest value."""

    check, arguments = "test_rows_of_any_magnitude", {"kind": SWA, "factor": 0.0}
    says = "rows of the window cache is off"
    own = frozenset({"insert_kv"})

    @hookimpl
    def dsv4_insert_kv(self, layer, state, q, kv, positions, caches, step):
        kv = kv / kv.abs().amax(-1, keepdim=True) * kv.abs().amax(-1, keepdim=True)
        return super().dsv4_insert_kv(layer, state, q, kv, positions, caches, step)


class EpsOutsideTheRoot(Reference):
    """The norm's eps is added to the root of the mean square."""

    check, arguments, says = "test_rows_of_any_magnitude", {"kind": SWA, "factor": 1e-6}, "query is off"
    own = frozenset({"insert_kv"})

    @hookimpl
    def dsv4_insert_kv(self, layer, state, q, kv, positions, caches, step):
        root = q.float().square().mean(-1, keepdim=True).sqrt()
        normed = (q / (root + layer.model.rms_norm_eps)).to(q.dtype)
        return super().dsv4_insert_kv(layer, state, normed, kv, positions, caches, step)


class PaddingWrites(Reference):
    """A graph's rows of padding write where the first request's page 0 would be."""

    check, arguments = "test_graphs_write_what_steps_write", {"kind": SWA}
    says = "bytes of the window cache changed that no row has"
    own, capabilities = frozenset({"insert_kv"}), frozenset({"graph"})

    @hookimpl
    def dsv4_insert_kv(self, layer, state, q, kv, positions, caches, step):
        step = replace(step, window=replace(step.window, slot_mapping=step.window.slot_mapping.clamp_min(0)))
        return super().dsv4_insert_kv(layer, state, q, kv, positions, caches, step)


class StaleRequests(Reference):
    """A graph keeps the requests of the step that it was captured for."""

    check, arguments = "test_a_layer_of_graphs", {"kind": SWA}
    says = "output of a swa layer is off"
    capabilities = frozenset({"graph"})

    class Step(ReferenceStep):
        def plan(self, step):
            if getattr(self, "_step", None) is not step:
                super().plan(step)
            self._step = step


class WidthOfTheStep(Reference):
    """Scores are as wide as the step's longest request, which a graph cannot follow."""

    check, arguments = "test_a_layer_of_graphs", {"kind": C4A}
    says = "has a width that depends on the step"
    own, capabilities = frozenset({"index_logits", "index_topk"}), frozenset({"graph"})

    @hookimpl
    def dsv4_index_logits(self, layer, q, weights, visible, tokens, width, caches, step):
        scores = super().dsv4_index_logits(layer, q, weights, visible, tokens, width, caches, step)
        return scores[:, : int(step.positions.max() + 1) // layer.kind.ratio]


class EntryWrittenOnce(Reference):
    """An entry that drafts completed stays, though they were rejected."""

    check, arguments = "test_rejected_drafts_leave_no_trace", {"kind": C4A, "accepted": 0}
    says = "rows of the compressed cache is off"
    own = frozenset({"compress"})
    written: ClassVar[set[int]] = set()

    @hookimpl
    def dsv4_compress(self, layer, state, projected, positions, caches, step, target):
        table = step.compressed[layer.kind.name]
        if target == "compressed":
            slots = [-1 if slot in self.written else slot for slot in table.slot_mapping.tolist()]
            self.written.update(slots)
            table = replace(table, slot_mapping=torch.tensor(slots))
        step = replace(step, compressed={layer.kind.name: table})
        super().dsv4_compress(layer, state, projected, positions, caches, step, target)


class HalvesSwapped(Reference):
    """A token gives the wrong half of its channels to its own group."""

    check, arguments, says = (
        "test_what_steps_write",
        {"kind": C4A},
        "part of rows of the compressed cache is off",
    )
    own = frozenset({"compress"})

    @hookimpl
    def dsv4_compress(self, layer, state, projected, positions, caches, step, target):
        if target == "compressed":
            values, scores = projected.chunk(2, -1)
            projected = torch.cat([values.roll(values.shape[-1] // 2, -1), scores], -1)
        super().dsv4_compress(layer, state, projected, positions, caches, step, target)


class EntriesAtTheirOwnNumber(Reference):
    """Entry j is rotated at position j instead of that of its first token."""

    check, arguments, says = (
        "test_what_steps_write",
        {"kind": C128A},
        "part of rows of the compressed cache is off",
    )
    own = frozenset({"compress"})

    @hookimpl
    def dsv4_compress(self, layer, state, projected, positions, caches, step, target):
        state.rope = state.weights.rope[torch.arange(len(state.weights.rope)) // layer.kind.ratio]
        super().dsv4_compress(layer, state, projected, positions, caches, step, target)


class ChunkForgetsStates(Reference):
    """What an entry pools is taken from this step's tokens only."""

    check, arguments, says = (
        "test_what_steps_write",
        {"kind": C128A},
        "part of rows of the compressed cache is off",
    )
    own = frozenset({"compress"})

    @hookimpl
    def dsv4_compress(self, layer, state, projected, positions, caches, step, target):
        pool = caches.state.pool
        before, slots = pool.clone(), step.state[layer.kind.name].slot_mapping
        pool.zero_()
        super().dsv4_compress(layer, state, projected, positions, caches, step, target)
        slots = slots[slots >= 0]
        rows = caches.state.read(slots)
        pool.copy_(before)
        caches.state.write(slots, rows)


class IndexWithoutRelu(Reference):
    check, arguments, says = "test_index_logits", {"phase": "chunk"}, "scores of a query is off"
    own = frozenset({"index_logits"})

    @hookimpl
    def dsv4_index_logits(self, layer, q, weights, visible, tokens, width, caches, step):
        positive = super().dsv4_index_logits(layer, q, weights, visible, tokens, width, caches, step)
        negated = (-q.float()).to(q.dtype)
        negative = super().dsv4_index_logits(layer, negated, weights, visible, tokens, width, caches, step)
        return torch.where(positive.isneginf(), positive, positive - negative)


class ScoresOfTheFirstQueries(Reference):
    """A part of a step's queries is scored as if it were the first one."""

    check, arguments = "test_index_logits_of_some_tokens", {}
    says = "scores of a query is off"
    own = frozenset({"index_logits"})

    @hookimpl
    def dsv4_index_logits(self, layer, q, weights, visible, tokens, width, caches, step):
        first = slice(len(q))
        own = (step.positions[first] + 1) // layer.kind.ratio
        return super().dsv4_index_logits(layer, q, weights, own, first, width, caches, step)


class ScoresBehindTheEntries(Reference):
    """What lies behind a query's entries is chosen, too."""

    check, arguments, says = "test_topk", {"k": 128, "entries": 226}, "chooses other entries"
    own = frozenset({"index_topk"})

    @hookimpl
    def dsv4_index_topk(self, layer, logits, visible):
        return super().dsv4_index_topk(layer, logits, torch.full_like(visible, logits.shape[1]))


class EntryChosenTooEarly(Reference):
    """An entry is seen one token before it is complete."""

    check, arguments, says = "test_topk", {"k": 512, "entries": 512}, "chooses other entries"
    own = frozenset({"index_topk"})

    @hookimpl
    def dsv4_index_topk(self, layer, logits, visible, step):
        return super().dsv4_index_topk(layer, logits, (step.positions + 4) // 4)


class AllThatFitUnsorted(Reference):
    """Where there is one entry more than are chosen, the first ones are taken."""

    check, arguments, says = "test_topk", {"k": 512, "entries": 513}, "chooses other entries"
    own = frozenset({"index_topk"})

    @hookimpl
    def dsv4_index_topk(self, layer, logits, visible):
        if int(visible.max()) <= layer.model.index_topk + 1:
            logits = torch.where(logits > -math.inf, 1.0, -math.inf)
        return super().dsv4_index_topk(layer, logits, visible)


class TiesToTheHighest(Reference):
    check, arguments, says = "test_topk", {"k": 128, "entries": 226}, "chooses other entries"
    own = frozenset({"index_topk"})

    @hookimpl
    def dsv4_index_topk(self, layer, logits, visible):
        known = logits[:, : int(visible.max())]
        chosen = super().dsv4_index_topk(layer, known.flip(-1), visible)
        return torch.where(chosen < 0, chosen, known.shape[1] - 1 - chosen)


class NaNIsChosen(Reference):
    check, arguments, says = "test_topk", {"k": 128, "entries": 226}, "chooses other entries"
    own = frozenset({"index_topk"})

    @hookimpl
    def dsv4_index_topk(self, layer, logits, visible):
        return super().dsv4_index_topk(layer, logits.nan_to_num(nan=math.inf, neginf=-math.inf), visible)


class OnlyTheChunkIsScored(Reference):
    """The entries of earlier chunks are never chosen."""

    check, arguments, says = "test_choices", {"phase": "chunk"}, "worse than its 128 best"
    own = frozenset({"index_logits"})

    @hookimpl
    def dsv4_index_logits(self, layer, q, weights, visible, tokens, width, caches, step):
        scores = super().dsv4_index_logits(layer, q, weights, visible, tokens, width, caches, step)
        return torch.where(scores.isneginf(), scores, -torch.arange(scores.shape[1]).float())


class RotatedBackAtTheNextPosition(Reference):
    check, arguments, says = "test_rotating_back_and_projecting", {"tokens": 5}, "output projection is off"

    class Layer(ReferenceLayer):
        def o_proj(self, attention, positions):
            return super().o_proj(attention, (positions + 1) % len(self.rope))


class NotRotatedBack(Reference):
    check, arguments, says = "test_attention_and_projection", {"private": False}, "output projection is off"

    class Layer(ReferenceLayer):
        def o_proj(self, attention, positions):
            return super().o_proj(attention, torch.zeros_like(positions))


class PositionsInBf16(Reference):
    check, arguments, says = "test_far_positions", {"kind": SWA}, "output projection is off"

    class Layer(ReferenceLayer):
        def o_proj(self, attention, positions):
            return super().o_proj(attention, positions.bfloat16().long().clamp_max(len(self.rope) - 1))


class EveryRankProjectsAll(Reference):
    """A rank gives what the host's reduction is to give."""

    check, arguments, says = "test_ranks_add_up", {"ranks": 2}, "sum of the ranks' projections is off"

    class Layer(ReferenceLayer):
        def o_proj(self, attention, positions):
            return super().o_proj(attention, positions) * (self.layer.model.o_groups / self.layer.num_groups)


class ReadsConsumedWeights(Reference):
    """A weight that the plan consumes is read when it may be gone."""

    check, arguments, says = "test_weights_are_the_hosts", {}, "output projection is off"

    class Layer(ReferenceLayer):
        def __init__(self, layer, weights):
            super().__init__(layer, weights)
            self.late = weights

        def o_proj(self, attention, positions):
            return OutputProjection(self.layer, self.late, ops)(attention, positions)


class FormatReplaced(Reference):
    """A user asks for bf16 and gets the packed format."""

    check, arguments = "test_dtype_strings", {"key": "kv_cache_dtype"}
    says = "kv_cache_dtype=bf16"

    @hookimpl
    def dsv4_resolve_kv_cache(self, request):
        if request.kv_cache_dtype in ("bf16", "bfloat16"):
            return cache_layout(request.model, "fp8_ds_mla", "fp8")
        return reference.dsv4_resolve_kv_cache(request)


class PlansByTheClock(Reference):
    check, arguments, says = "test_asking_twice_gives_the_same", {}, "Asked twice, it answers differently"
    asked = 0

    @hookimpl
    def dsv4_plan_layer(self, request, layer):
        self.asked += 1
        return replace(super().dsv4_plan_layer(request, layer), variant=f"split_{self.asked}")


class WorkspaceShrinks(Reference):
    check, arguments, says = "test_plans", {}, "A larger step takes less memory"

    @hookimpl
    def dsv4_plan_layer(self, request, layer):
        plan = super().dsv4_plan_layer(request, layer)
        return replace(plan, workspace_bytes=10**9 // request.limits.max_tokens)


class SizeUntold(Reference):
    check, arguments, says = "test_description", {}, "prepared_bytes=None"

    @hookimpl
    def dsv4_describe(self, state):
        return {"kernel": "torch"}


class ReasonWithoutASentence(Reference):
    check, arguments, says = "test_refusals_say_what_to_do", {}, "is no sentence"

    @hookimpl
    def dsv4_unsupported_reasons(self, request):
        return [reference.Reason("q-heads", "heads % 64")] if request.num_heads % 64 else []


class RefusesWhatItDeclares(Reference):
    check, arguments = "test_what_is_not_declared_is_refused", {"capability": "strided-pages"}
    says = "It declares 'strided-pages' and refuses a request that needs it, with ['layout']"

    @hookimpl
    def dsv4_unsupported_reasons(self, request):
        return [reference.Reason("layout", "No strides.")] if request.strided_pages else []


MUTANTS: dict[str, type[Reference]] = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, Reference) and value not in (Reference, Attention)
}
