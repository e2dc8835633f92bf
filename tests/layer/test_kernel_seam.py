"""A host that owns insert, compressor, indexer and caches, and only lends its tensors to the backend."""

from dataclasses import replace

import pytest
import torch

from dsv4core import ops
from dsv4core.api import DSV4Error, LayerCaches, LayerWeights, Limits, Request
from dsv4core.framework.binding import bind_kind, bind_layer
from dsv4core.framework.selection import select
from dsv4core.kvcache import allocate_cache, check_caches
from dsv4core.model.shapes import layer_spec
from dsv4core.step import Batch, StepBuffers
from tests.layer.conftest import CPU, KINDS, hidden_states

TOKENS = 300


class Engine:
    """Strided pools, pages in no order, freed window pages; its own insert, compressor and indexer."""

    def __init__(self, checkpoint, kind, kv_format, weights=None):
        limits = Limits(TOKENS, 1, TOKENS, TOKENS)
        self.request = Request(
            "cpu",
            "",
            checkpoint.shape,
            16,
            limits,
            kv_cache_dtype=kv_format,
            seam="kernel",
            strided_pages=True,
        )
        self.selection = select(self.request, "reference")
        self.spec = layer_spec(checkpoint.shape, KINDS[kind])
        self.weights = checkpoint.layer(self.spec.index, max_positions=TOKENS)
        self.bound = bind_layer(self.selection, self.spec, weights or self.weights, CPU)
        self.kind = bind_kind(self.selection, self.spec.kind, CPU)
        self.caches, self.sizes = self._caches(), self.request.page_sizes
        check_caches(self.caches, self.spec, self.selection.layout)
        pages = {"window": 9, "context": 9, "c4a": 128, "c128a": 128}
        self.buffers = StepBuffers([self.spec.kind], limits, self.sizes, pages)

    def _caches(self):
        layout, kind, model = self.selection.layout, self.spec.kind, self.spec.model
        sizes = self.request.page_sizes

        def strided(format, pages, rows):
            stride = format.page_bytes(rows) + 2 * format.page_alignment
            return allocate_cache(format, pages, rows, page_stride_bytes=stride)

        caches = LayerCaches(strided(layout.window, 9, sizes.window))
        if kind.ratio is None:
            return caches
        state = layout.state
        caches = replace(
            caches,
            compressed=strided(layout.compressed, 9, sizes.compressed_rows(kind)),
            state=strided(state.resized(kind.groups * model.head_dim), 128, sizes.state_rows(kind)),
        )
        if kind.select != "top_k":
            return caches
        return replace(
            caches,
            index=strided(layout.index, 9, sizes.compressed_rows(kind)),
            index_state=strided(
                state.resized(kind.groups * model.index_head_dim), 128, sizes.state_rows(kind)
            ),
        )

    def step(self, computed, query):
        order = torch.tensor([[7, 2, 8, 0, 5]], dtype=torch.int32)
        window = order.clone()
        window[0, : max(0, computed - 127) // 64] = -1  # pages that fell out of the window are given back
        states = {name: torch.randperm(128, dtype=torch.int32)[None] for name in ("c4a", "c128a")}
        if not hasattr(self, "states"):
            self.states = states
        step = self.buffers.build(Batch((computed,), (query,), 0, window, order[:, :2], self.states))
        self.kind.prepare_step(step)
        self.kind.plan_step(step)
        return step

    def attend(self, projected, step):
        rope, eps, kind = self.weights.rope, self.spec.model.rms_norm_eps, self.spec.kind
        caches, tensors = self.caches, self.weights.tensors
        slots, q_dtype = step.window.slot_mapping, torch.bfloat16
        q = ops.qk_norm_rope_insert(
            projected.q, projected.kv, step.positions, rope, caches.window, slots, eps, 16, q_dtype
        )
        for entry, prefix, state, entries in (
            (projected.entry, "compressor", caches.state, caches.compressed),
            (projected.index_entry, "indexer.compressor", caches.index_state, caches.index),
        ):
            if entry is not None:
                ape, norm = tensors[f"{prefix}.ape"].data, tensors[f"{prefix}.norm"].data
                ops.compress(entry, ape, norm, rope, eps, kind, step, state, entries)
        selected = None
        if kind.select == "top_k":
            visible = (step.positions + 1) // kind.ratio
            index_q, weights = ops.index_query(
                projected.index_q, projected.index_weights, step.positions, rope, "fp8"
            )
            table = step.compressed[kind.name]
            width = max(1, int(visible.max()))
            scores = ops.index_logits(
                index_q, weights, caches.index, table, step.token_to_request, visible, width
            )
            selected = ops.index_topk(scores, visible, 64)
        arguments = (caches, selected, step.positions, step, self.kind.state)
        return self.bound.forward_mqa(q, *arguments, None, True, True), q, arguments


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("kv_format", ["fp8_ds_mla", "bf16", "fp8_e4m3"])
def test_the_kernel_seam_gives_what_the_layer_gives(make_stack, checkpoint, kind, kv_format):
    engine = Engine(checkpoint, kind, kv_format)
    stack = make_stack([KINDS[kind]], length=TOKENS, kv=kv_format, index="fp8", dtype="bfloat16")
    layer, x = stack.layers[0], hidden_states(TOKENS, dtype=torch.bfloat16)
    done = 0
    for count in (200, 99, 1):
        part = x[done : done + count]
        expected, _ = stack.attend(layer, part, stack.plan([done], [count]))
        step = engine.step(done, count)
        attention, q, arguments = engine.attend(layer.attention.project(part), step)
        out = engine.bound.o_proj(attention, step.positions)
        torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-2)
        without, _ = (
            engine.bound.forward_mqa(q, *arguments, None, True, False),
            engine.bound.forward_mqa(q, *arguments, None, False, True),
        )
        sinks = engine.weights["attn_sink"].data
        share = torch.sigmoid(attention.lse - sinks)[..., None]  # a host that applies the sink itself
        torch.testing.assert_close(without.data.float() * share, attention.data.float(), atol=2e-2, rtol=2e-2)
        assert torch.equal(without.lse, attention.lse)
        done += count


def test_a_host_may_keep_the_output_projection(checkpoint):
    whole = checkpoint.layer(0, max_positions=TOKENS)
    engine = Engine(checkpoint, "swa", "bf16", LayerWeights({"attn_sink": whole["attn_sink"]}, whole.rope))
    step = engine.step(0, 4)
    q = torch.randn(4, 16, 512).bfloat16()
    out = engine.bound.forward_mqa(
        q, engine.caches, None, step.positions, step, engine.kind.state, None, False, True
    )
    assert out.lse is None
    with pytest.raises(DSV4Error) as error:
        engine.bound.o_proj(out, step.positions)
    assert str(error.value) == (
        "layers.0 was asked for its output projection and was built without wo_a and wo_b; pass them with "
        "its weights, or project in the host."
    )
