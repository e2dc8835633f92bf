"""What one call of each operation is, on a backend's inputs."""

from __future__ import annotations

from collections.abc import Callable

from dsv4core.api import AttentionOutput, ConfigError
from dsv4core.attention import DeepseekV4Attention
from dsv4core.bench.inputs import Inputs, Turn
from dsv4core.bench.timing import Call

LAYERS = 3
"""Layers whose weights take turns: at V4-Flash's sizes they are some hundred megabytes together."""


def calls(operation: str, inputs: Inputs) -> list[Call]:
    """One call a turn of the inputs.

    Raises:
        ConfigError: Layers of this kind have no such operation.
    """
    kind = inputs.workload.kind
    lacking = {"compress": kind.ratio is None, "indexer": kind.select != "top_k"}
    if lacking.get(operation):
        raise ConfigError(f"{kind.name} layers have no {operation}; measure another kind.")
    return _MAKERS[operation](inputs)


def _plan_step(inputs: Inputs) -> list[Call]:
    return [lambda turn=turn: turn.kind.plan_step(turn.step) for turn in inputs.turns]  # type: ignore[misc]


def _forward_mqa(inputs: Inputs) -> list[Call]:
    (layer, _), *_ = inputs.layers(1)

    def call(turn: Turn) -> object:
        step = turn.step
        return layer.forward_mqa(
            turn.q, inputs.caches, turn.selected, step.positions, step, turn.kind.state, None, False, True
        )

    return [lambda turn=turn: call(turn) for turn in inputs.turns]  # type: ignore[misc]


def _o_proj(inputs: Inputs) -> list[Call]:
    layers = inputs.layers(LAYERS)
    outputs = [
        layer.forward_mqa(
            turn.q,
            inputs.caches,
            turn.selected,
            turn.step.positions,
            turn.step,
            turn.kind.state,
            None,
            False,
            True,
        )
        for turn in inputs.turns[: 2 * LAYERS]
        for layer in (layers[0][0],)
    ]

    def call(number: int, output: AttentionOutput) -> object:
        layer, _ = layers[number % LAYERS]
        return layer.o_proj(output, inputs.turns[number].step.positions)

    return [lambda n=n, output=output: call(n, output) for n, output in enumerate(outputs)]  # type: ignore[misc]


def _of_layers(run: Callable[[DeepseekV4Attention, Inputs, Turn], Call]) -> Callable[[Inputs], list[Call]]:
    """Calls of whole layers that take turns."""

    def make(inputs: Inputs) -> list[Call]:
        layout = inputs.selection.layout
        layers = [
            DeepseekV4Attention(bound, weights, layout, graph=inputs.selection.request.graph)
            for bound, weights in inputs.layers(LAYERS)
        ]
        return [run(layers[n % LAYERS], inputs, turn) for n, turn in enumerate(inputs.turns)]

    return make


def _insert_kv(layer: DeepseekV4Attention, inputs: Inputs, turn: Turn) -> Call:
    projected = layer.project(turn.hidden)
    return lambda: layer.insert_kv(projected, inputs.caches, turn.step)


def _compress(layer: DeepseekV4Attention, inputs: Inputs, turn: Turn) -> Call:
    projected = layer.project(turn.hidden)
    return lambda: layer.compress(projected, inputs.caches, turn.step)


def _indexer(layer: DeepseekV4Attention, inputs: Inputs, turn: Turn) -> Call:
    projected = layer.project(turn.hidden)
    return lambda: layer.select(projected, inputs.caches, turn.step)


def _layer(layer: DeepseekV4Attention, inputs: Inputs, turn: Turn) -> Call:
    return lambda: layer.forward(turn.hidden, turn.step, inputs.caches, turn.kind.state)


_MAKERS: dict[str, Callable[[Inputs], list[Call]]] = {
    "plan_step": _plan_step,
    "insert_kv": _of_layers(_insert_kv),
    "compress": _of_layers(_compress),
    "indexer": _of_layers(_indexer),
    "forward_mqa": _forward_mqa,
    "o_proj": _o_proj,
    "layer": _of_layers(_layer),
}
