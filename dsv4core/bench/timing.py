"""Times calls that touch other memory each time, and measures what the device does at best."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from dsv4core.bench.cost import Ceilings

Call = Callable[[], object]
SECONDS = 0.3
"""Measured of each row, at least."""
CLOCK = 2e9
"""Cycles a second of a GPU, about: it decides how long one is kept waiting."""
PATIENCE = 10 * SECONDS
"""After which fewer than 5 rounds are enough: they are long, and a time is a mean over a round."""


def microseconds(calls: Sequence[Call], device: torch.device, graph: bool) -> float:
    """The median over rounds of all calls, of the mean time of a call in a round.

    Without a graph, a GPU begins a round when the host has launched about all of it, as far as the driver's
    queue holds that: as if it were busy with what came before. Calls that wait for the device take the host's
    time as well.

    Args:
        calls: The same operation on different memory, so that caches hold nothing of it.
        device: Where they run.
        graph: Whether to capture a round in a graph and replay it.
    """
    for call in calls:
        call()
    if device.type != "cuda":
        return _on_a_cpu(calls)
    _synchronise(device)
    run = _captured(calls) if graph else lambda: [call() for call in calls]
    if graph:
        run()
        _synchronise(device)
    times: list[float] = []
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launching = 0 if graph else _launching_seconds(run, device)
    while sum(times) < SECONDS * 1e3 or (len(times) < 5 and sum(times) < PATIENCE * 1e3):
        if launching:
            torch.cuda._sleep(int(2 * launching * CLOCK))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) / len(calls) * 1e3


def host_microseconds(call: Call, device: torch.device) -> float:
    """The median of the host's time for a call, each of which begins when the device has nothing to do.

    What the device does behind it is not counted, unless the call waits for that.
    """
    times: list[float] = []
    while len(times) < 5 or sum(times) < SECONDS:
        if device.type == "cuda":
            _synchronise(device)
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The bandwidth of a copy and the rates of matrix products, here and now."""
    gpu = device.type == "cuda"
    source = torch.empty((1 << 30) if gpu else (1 << 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = microseconds([lambda: target.copy_(source)], device, graph=False)
    size = 8192 if gpu else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = microseconds([lambda: a @ b], device, graph=False)
    if not gpu:  # few processors multiply bf16, and operations then compute in fp32
        wide = torch.randn(size, size)
        product = min(product, microseconds([lambda: wide @ wide], device, graph=False))
    return Ceilings(
        copy_gbps=2 * source.nbytes / copy / 1e3,
        matmul_tflops=2 * size**3 / product / 1e6,
        fp8_tflops=2 * size**3 / min(product, _fp8_product(size, device)) / 1e6,
    )


def cache_bytes(device: torch.device) -> int:
    """Bytes of the device's last cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return 32 << 20


def _fp8_product(size: int, device: torch.device) -> float:
    """Microseconds of an FP8 product, infinite where the device has none."""
    if device.type != "cuda":
        return math.inf
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    try:
        return microseconds(
            [lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16)], device, graph=False
        )
    except (RuntimeError, ValueError):  # no FP8, or another flavour of it
        return math.inf


def _launching_seconds(run: Callable[[], object], device: torch.device) -> float:
    """What the host takes to launch a round."""
    begin = time.perf_counter()
    run()
    launched = time.perf_counter() - begin
    _synchronise(device)
    return min(launched, 0.02)  # the driver's queue holds no more launches


def _on_a_cpu(calls: Sequence[Call]) -> float:
    times: list[float] = []
    for call in cycle(calls):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
        if len(times) >= 5 and sum(times) >= SECONDS:
            break
    return statistics.median(times) * 1e6


def _captured(calls: Sequence[Call]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Results that are kept until the end lie side by side, and not each where the last one lay.
        _results = [call() for call in calls]
    return graph.replay


def _synchronise(device: torch.device) -> None:
    torch.cuda.synchronize(device)
