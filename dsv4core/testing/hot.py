"""A layer's hot hooks, each captured as a graph, watched for waiting, or measured in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dsv4core.api import OWN_OPS, AttentionOutput
from dsv4core.stack import AttentionStack

Hook = Callable[..., Any]
HOOKS = ("forward_mqa", "o_proj", *sorted(OWN_OPS))

ROUNDING = 1 << 16
"""Bytes by which torch's allocator may round what a hook asks for, 512 a tensor."""


def wrap_hooks(stack: AttentionStack, wrap: Callable[[str, Hook], Hook]) -> None:
    """Have every call of a hot hook of these layers go through `wrap(name, hook)`."""
    for layer in stack.layers:
        bound = layer.attention.bound
        hooks = {name: hook for name in HOOKS if (hook := getattr(bound, name)) is not None}
        wrapped: dict[str, Any] = {name: wrap(name, hook) for name, hook in hooks.items()}
        layer.attention.bound = replace(bound, **wrapped)
    for name, kind in stack.kinds.items():
        stack.kinds[name] = replace(kind, plan_step=wrap("plan_step", kind.plan_step))


class Replayed:
    """A function that is captured at its first call, which is the largest, and replayed at the others.

    Tensors are copied to where those of the first call lie; rows behind them stay as they were. A step is not
    copied: its tensors are views of buffers that keep their addresses. Where there are no graphs the function
    runs on the first call's arguments again, which is all that a graph sees.
    """

    def __init__(self, function: Hook, device: torch.device) -> None:
        """Capture nothing yet."""
        self._function, self._device = function, device
        self._captured: dict[tuple[str, ...], tuple[list[Any], Callable[[], Any]]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """The function's result; of a tensor the rows that this call's arguments have."""
        variant = tuple(own for own in arguments if isinstance(own, str))
        if variant not in self._captured:
            held = [own.clone() if isinstance(own, torch.Tensor) else own for own in arguments]
            self._captured[variant] = held, captured(lambda: self._function(*held), self._device)
        held, replay = self._captured[variant]
        rows = None
        for index, new in enumerate(arguments):
            if isinstance(new, torch.Tensor):
                rows, own = new.shape[0], held[index]
                assert own.shape[1:] == new.shape[1:], (
                    f"A hook was captured with {list(own.shape)} and is given {list(new.shape)}: what "
                    "another one returned has a width that depends on the step."
                )
                own[:rows].copy_(new)
            elif isinstance(new, AttentionOutput):
                held[index] = new  # where there are graphs, it is the same each time
        result = replay()
        return result[:rows] if isinstance(result, torch.Tensor) else result


def captured(run: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """A graph of `run` on a GPU; elsewhere `run` itself, which reads the same tensors again."""
    if device.type != "cuda":
        run()
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Any:
        graph.replay()
        torch.cuda.synchronize()
        return result

    return replay


def without_waiting(name: str, hook: Hook) -> Hook:
    """The hook, failing where it waits for the device."""

    def watched(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return hook(*arguments)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise AssertionError(f"dsv4_{name} waits for the device: {error}") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched


def within_memory(allowed: int) -> Callable[[str, Hook], Hook]:
    """Wraps hooks that may take `allowed` bytes from torch's allocator besides what they return."""

    def wrap(name: str, hook: Hook) -> Hook:
        def measured(*arguments: Any) -> Any:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            result = hook(*arguments)
            taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            kept = torch.cuda.memory_allocated() - before
            assert taken <= allowed + ROUNDING, (
                f"dsv4_{name} took {taken:,} bytes besides the {kept:,} that it returned, and its plan's "
                f"workspace_bytes are {allowed:,}."
            )
            return result

        return measured

    return wrap
