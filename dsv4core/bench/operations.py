"""What one call of each operation is, on a backend's inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsv4core.api import AttentionOutput, KVCacheLayout, LayerCaches, LayerWeights
from dsv4core.attention import DeepseekV4Attention, core_operations
from dsv4core.bench.gaps import Unmeasurable
from dsv4core.bench.inputs import Inputs, Turn
from dsv4core.bench.timing import Call
from dsv4core.framework.binding import BoundLayer


@dataclass(frozen=True, eq=False)
class Measured:
    """What is timed.

    Attributes:
        operation: The operation, or the part of it that a peer does alone.
        calls: One a turn.
        layout: The cache formats that they read.
        captured: Whether their users capture them in graphs.
        q_dtype: Dtype of q where attention reads it; the activation dtype if empty.
        host: Whether it is the host's time that counts.
    """

    operation: str
    calls: list[Call]
    layout: KVCacheLayout
    captured: bool = True
    q_dtype: str = ""
    host: bool = False


def measured(operation: str, inputs: Inputs) -> Measured:
    """The backend's calls of an operation.

    Raises:
        Unmeasurable: Layers of this kind have no such operation.
    """
    kind = inputs.workload.kind
    chooses = operation.startswith("indexer") or operation == "mixed_table"
    if (operation == "compress" and kind.ratio is None) or (chooses and kind.select != "top_k"):
        raise Unmeasurable(f"{kind.name} layers have no {operation}; measure another kind.")
    backend = inputs.selection.backend
    if operation == "prepare_step" and not (inputs.plan.prepares and backend.implements("dsv4_prepare_step")):
        raise Unmeasurable(
            f"backend={backend.name} does nothing on the host before a step; leave prepare_step out."
        )
    calls, layout, host = _MAKERS[operation](inputs), inputs.selection.layout, operation == "prepare_step"
    return Measured(operation, calls, layout, q_dtype=inputs.plan.q_dtype, host=host)


def _prepare_step(inputs: Inputs) -> list[Call]:
    turn = inputs.turns("prepare_step", calls=1 << 20)[0]  # lengths are what it takes time for
    return [lambda: turn.kind.prepare_step(turn.step)]


def _plan_step(inputs: Inputs) -> list[Call]:
    turns = inputs.turns("plan_step")
    return [lambda turn=turn: turn.kind.plan_step(turn.step) for turn in turns]  # type: ignore[misc]


def _forward_mqa(inputs: Inputs) -> list[Call]:
    ((layer, _),) = inputs.layers(1)
    turns = inputs.turns("forward_mqa")
    return [lambda turn=turn: _attend(layer, turn, inputs.caches) for turn in turns]  # type: ignore[misc]


def _attend(layer: BoundLayer, turn: Turn, caches: LayerCaches) -> AttentionOutput:
    step, state = turn.step, turn.kind.state
    return layer.forward_mqa(turn.q, caches, turn.selected, step.positions, step, state, None, False, True)


def _step(operation: str, one: Callable[[int, Turn], Call], inputs: Inputs) -> list[Call]:
    """The plan of a step and all layers of the kind behind it: each call is a layer, the first one plans."""
    count = inputs.workload.layers

    def planned(turn: Turn, call: Call) -> Call:
        def run() -> object:
            turn.kind.plan_step(turn.step)
            return call()

        return run

    calls = []
    for turn in inputs.turns(operation, count):
        first, *others = (one(number, turn) for number in range(count))
        calls += [planned(turn, first), *others]
    return calls


def _step_mqa(inputs: Inputs) -> list[Call]:
    ((layer, _),) = inputs.layers(1)

    def one(number: int, turn: Turn) -> Call:
        caches = inputs.shifted(number)  # a layer has rows of its own
        return lambda: _attend(layer, turn, caches)

    return _step("forward_mqa.step", one, inputs)


def _step_layer(inputs: Inputs) -> list[Call]:
    layers = _attention(inputs, inputs.workload.layers)

    def one(number: int, turn: Turn) -> Call:
        caches = inputs.shifted(number)
        return lambda: layers[number].forward(turn.hidden, turn.step, caches, turn.kind.state)

    return _step("layer.step", one, inputs)


def _o_proj(inputs: Inputs) -> list[Call]:
    """Each turn has a layer of its own: what is read is mostly weights."""
    turns = inputs.turns("o_proj")

    def call(layer: BoundLayer, turn: Turn) -> Call:
        output = _attend(layer, turn, inputs.caches)
        return lambda: layer.o_proj(output, turn.step.positions)

    return [call(layer, turn) for (layer, _), turn in zip(inputs.layers(len(turns)), turns, strict=True)]


def _project(inputs: Inputs) -> list[Call]:
    """Likewise."""
    turns = inputs.turns("project")
    layers = zip(_attention(inputs, len(turns)), turns, strict=True)
    return [lambda layer=layer, turn=turn: layer.project(turn.hidden) for layer, turn in layers]  # type: ignore[misc]


def _layer(inputs: Inputs) -> list[Call]:
    """Likewise."""
    turns = inputs.turns("layer")

    def call(layer: DeepseekV4Attention, turn: Turn) -> Call:
        return lambda: layer.forward(turn.hidden, turn.step, inputs.caches, turn.kind.state)

    return [call(layer, turn) for layer, turn in zip(_attention(inputs, len(turns)), turns, strict=True)]


def _stage(operation: str, method: str) -> Callable[[Inputs], list[Call]]:
    """A stage of a layer that takes what the layer projects."""

    def calls(inputs: Inputs) -> list[Call]:
        (layer,) = _attention(inputs, 1)
        run = getattr(layer, method)

        def call(turn: Turn) -> Call:
            projected = layer.project(turn.hidden)
            return lambda: run(projected, inputs.caches, turn.step)

        return [call(turn) for turn in inputs.turns(operation)]

    return calls


def _select(inputs: Inputs) -> list[Call]:
    """The choice of entries, its queries' rotation included."""
    (layer,) = _attention(inputs, 1)

    def call(turn: Turn) -> Call:
        projected = layer.project(turn.hidden)
        return lambda: layer.select(projected, inputs.caches, turn.step, turn.kind.state)

    return [call(turn) for turn in inputs.turns("indexer")]


def _logits(inputs: Inputs) -> list[Call]:
    """The scores alone, for queries that are rotated already."""
    (layer,) = _attention(inputs, 1)
    operations, dtype = core_operations(inputs.plan), inputs.selection.layout.index.name

    def call(turn: Turn) -> Call:
        projected, step = layer.project(turn.hidden), turn.step
        heads = (projected.index_q, projected.index_weights, step.positions, inputs.rope)
        q, weights = operations.index_query(*heads, dtype.removeprefix("index_"))
        visible, width = _visible(inputs, turn)
        rest = (slice(None), width, inputs.caches, step, turn.kind.state)
        return lambda: layer.scores(q, weights, visible, *rest)

    return [call(turn) for turn in inputs.turns("indexer.logits")]


def _topk(inputs: Inputs) -> list[Call]:
    """The choice alone, among normal scores."""
    (layer,) = _attention(inputs, 1)

    def call(turn: Turn) -> Call:
        visible, width = _visible(inputs, turn)
        scores = torch.randn(turn.step.num_tokens, width, device=inputs.device)
        return lambda: layer.best(scores, visible, turn.step)

    return [call(turn) for turn in inputs.turns("indexer.topk")]


def _visible(inputs: Inputs, turn: Turn) -> tuple[torch.Tensor, int]:
    """Entries that each query sees, and the most of them."""
    kind = inputs.workload.kind
    assert kind.ratio is not None
    return (turn.step.positions + 1) // kind.ratio, kind.visible_entries(max(inputs.workload.total))


def _mixed_table(inputs: Inputs) -> list[Call]:
    """The table of window and chosen slots that TRTLLM-gen takes."""
    operations, kind, sizes = core_operations(inputs.plan), inputs.workload.kind, inputs.sizes

    def call(turn: Turn) -> Call:
        step, entries = turn.step, turn.step.compressed[kind.name]
        assert turn.selected is not None
        window = operations.window_slots(
            *(step.positions, step.token_to_request, step.window.block_table, sizes.window),
            inputs.spec.model.sliding_window,
        )
        chosen = operations.entry_slots(
            turn.selected, step.token_to_request, entries.block_table, entries.page_size
        )
        pages = [(rows, rows) for rows in (sizes.window, entries.page_size)]
        return lambda: operations.mixed_sparse_indices(window, chosen, *pages)

    return [call(turn) for turn in inputs.turns("mixed_table")]


def _inverse_rope_quant(inputs: Inputs) -> list[Call]:
    """Heads rotated back and quantised, as FP8 projections take them."""
    operations, heads = core_operations(inputs.plan), inputs.spec.num_heads

    def call(turn: Turn) -> Call:
        x = turn.q[:, :heads].to(inputs.dtype)
        return lambda: operations.inverse_rope_quant(x, turn.step.positions, inputs.rope)

    return [call(turn) for turn in inputs.turns("inverse_rope_quant")]


def _product(name: str) -> Callable[[Inputs], list[Call]]:
    """A product with one weight, as the core does it; each turn has a weight of its own."""

    def calls(inputs: Inputs) -> list[Call]:
        operations, turns = core_operations(inputs.plan), inputs.turns(name)

        def call(weights: LayerWeights) -> Call:
            weight = operations.prepare_linear(weights[name])
            x = torch.randn(inputs.workload.tokens, weight.data.shape[1], device=inputs.device)
            x = x.to(inputs.dtype)
            return lambda: operations.linear(x, weight)

        return [call(weights) for weights in inputs.weights(len(turns))]

    return calls


def _attention(inputs: Inputs, count: int) -> list[DeepseekV4Attention]:
    layout, graph = inputs.selection.layout, inputs.selection.request.graph
    return [
        DeepseekV4Attention(bound, weights, layout, graph=graph) for bound, weights in inputs.layers(count)
    ]


_MAKERS: dict[str, Callable[[Inputs], list[Call]]] = {
    "prepare_step": _prepare_step,
    "plan_step": _plan_step,
    "project": _project,
    "insert_kv": _stage("insert_kv", "insert_kv"),
    "compress": _stage("compress", "compress"),
    "indexer": _select,
    "forward_mqa": _forward_mqa,
    "forward_mqa.step": _step_mqa,
    "o_proj": _o_proj,
    "layer": _layer,
    "layer.step": _step_layer,
    "indexer.logits": _logits,
    "indexer.topk": _topk,
    "mixed_table": _mixed_table,
    "inverse_rope_quant": _inverse_rope_quant,
    "wq_b": _product("wq_b"),
    "wo_b": _product("wo_b"),
}
