"""What one call of each operation is, on a backend's inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsv4core.api import AttentionOutput, KVCacheLayout
from dsv4core.attention import DeepseekV4Attention
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
    """

    operation: str
    calls: list[Call]
    layout: KVCacheLayout
    captured: bool = True
    q_dtype: str = ""


def measured(operation: str, inputs: Inputs) -> Measured:
    """The backend's calls of an operation.

    Raises:
        Unmeasurable: Layers of this kind have no such operation.
    """
    kind = inputs.workload.kind
    lacking = {"compress": kind.ratio is None, "indexer": kind.select != "top_k"}
    if lacking.get(operation):
        raise Unmeasurable(f"{kind.name} layers have no {operation}; measure another kind.")
    calls, layout = _MAKERS[operation](inputs), inputs.selection.layout
    return Measured(operation, calls, layout, q_dtype=inputs.plan.q_dtype)


def _plan_step(inputs: Inputs) -> list[Call]:
    turns = inputs.turns("plan_step")
    return [lambda turn=turn: turn.kind.plan_step(turn.step) for turn in turns]  # type: ignore[misc]


def _forward_mqa(inputs: Inputs) -> list[Call]:
    ((layer, _),) = inputs.layers(1)
    turns = inputs.turns("forward_mqa")
    return [lambda turn=turn: _attend(layer, inputs, turn) for turn in turns]  # type: ignore[misc]


def _attend(layer: BoundLayer, inputs: Inputs, turn: Turn) -> AttentionOutput:
    step, state = turn.step, turn.kind.state
    return layer.forward_mqa(
        turn.q, inputs.caches, turn.selected, step.positions, step, state, None, False, True
    )


def _o_proj(inputs: Inputs) -> list[Call]:
    """Each turn has a layer of its own: what is read is mostly weights."""
    turns = inputs.turns("o_proj")

    def call(layer: BoundLayer, turn: Turn) -> Call:
        output = _attend(layer, inputs, turn)
        return lambda: layer.o_proj(output, turn.step.positions)

    return [call(layer, turn) for (layer, _), turn in zip(inputs.layers(len(turns)), turns, strict=True)]


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


def _attention(inputs: Inputs, count: int) -> list[DeepseekV4Attention]:
    layout, graph = inputs.selection.layout, inputs.selection.request.graph
    return [
        DeepseekV4Attention(bound, weights, layout, graph=graph) for bound, weights in inputs.layers(count)
    ]


_MAKERS: dict[str, Callable[[Inputs], list[Call]]] = {
    "plan_step": _plan_step,
    "insert_kv": _stage("insert_kv", "insert_kv"),
    "compress": _stage("compress", "compress"),
    "indexer": _stage("indexer", "select"),
    "forward_mqa": _forward_mqa,
    "o_proj": _o_proj,
    "layer": _layer,
}
