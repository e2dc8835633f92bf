"""`dsv4 bench`: operations and layers of any backends, and peers, side by side in one run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dsv4core.api import BackendUnavailable, ConfigError
from dsv4core.bench.cost import Ceilings, costs
from dsv4core.bench.inputs import Inputs
from dsv4core.bench.operations import calls
from dsv4core.bench.peers import check_peer, peer_calls, peer_version
from dsv4core.bench.plots import check_plots, plot
from dsv4core.bench.rows import Row, device_name, keep, versions
from dsv4core.bench.timing import Call, measure_ceilings, microseconds
from dsv4core.bench.workload import KINDS, Workload
from dsv4core.cli.output import show, show_json_line
from dsv4core.cli.run import torch_device
from dsv4core.config import DSV4Config
from dsv4core.framework.platform import machine_of
from dsv4core.framework.request import build_request, configured_shape, select_configured
from dsv4core.framework.selection import Selection
from dsv4core.hydra import compose, expand_sweeps


def bench(words: Sequence[str]) -> int:
    """Measure what a configuration, or the sweep of several, asks for; the result is the exit code.

    Raises:
        DSV4Error: The configuration is wrong, or a named backend cannot run any of it.
    """
    configs = [compose(overrides) for overrides in expand_sweeps(words)]
    first = configs[0]
    commit = first.bench.commit
    if first.bench.plot is not None:
        check_plots()
    for name in dict.fromkeys(name for config in configs for name in config.bench.peers):
        check_peer(name)
    device = torch_device(first.device)
    ceilings = measure_ceilings(device, getattr(torch, first.dtype))
    rows: list[Row] = []
    for row in _measured(configs, device, ceilings):
        rows.append(row if commit is None else replace(row, commit=commit))
        if first.bench.out is not None:  # each at once: a later one may fail
            keep(Path(first.bench.out), rows[-1:])
        if first.json:
            show_json_line(asdict(rows[-1]))
    if not rows:
        raise ConfigError("Nothing could be measured; the reasons are above.")
    if not first.json:
        _print(rows, ceilings)
    if first.bench.plot is not None:
        for file in plot(rows, Path(first.bench.plot)):
            print(f"dsv4: {file}", file=sys.stderr)
    return 0


def _measured(configs: Iterable[DSV4Config], device: torch.device, ceilings: Ceilings) -> Iterator[Row]:
    """Rows of one workload after the other, so that those that are compared are measured together."""
    seen: set[str] = set()
    pairs = [(place, own, workload) for own in configs for place, workload in enumerate(_workloads(own))]
    for _, config, workload in sorted(pairs, key=lambda pair: pair[0]):
        try:
            selection = _selection(config, workload, device)
        except BackendUnavailable as error:
            _skip(config.backend.name, workload, str(error))
            continue
        try:
            yield from _rows(config, selection, workload, device, ceilings, seen)
        except torch.OutOfMemoryError:
            _skip(selection.backend.name, workload, "it does not fit the device's memory.")


def _workloads(config: DSV4Config) -> Iterator[Workload]:
    own = config.bench
    for phase, kind, context, tokens in product(own.phase, own.kind, own.context, own.tokens):
        yield Workload(phase, KINDS[kind], tokens, context)


def _selection(config: DSV4Config, workload: Workload, device: torch.device) -> Selection:
    request = build_request(config, configured_shape(config), machine_of(device), probe="host")
    kinds = (workload.kind,)
    model = replace(request.model, num_hidden_layers=1, layer_kinds=kinds, draft_layer_kinds=())
    longest = max(workload.limits.max_model_len, request.model.max_position_embeddings)
    model = replace(model, max_position_embeddings=longest)
    graph = device.type == "cuda" and config.bench.mode != "eager" and workload.phase == "decode"
    asked = replace(request, model=model, limits=workload.limits, graph=graph)
    try:
        return select_configured(config, asked)
    except BackendUnavailable:
        if not graph or config.bench.mode == "graph":
            raise
        return select_configured(config, replace(asked, graph=False))


def _rows(
    config: DSV4Config,
    selection: Selection,
    workload: Workload,
    device: torch.device,
    ceilings: Ceilings,
    seen: set[str],
) -> Iterator[Row]:
    inputs = Inputs(selection, workload, device)
    graph, decode = selection.request.graph, workload.phase == "decode"
    for operation in config.bench.op:
        try:
            own = calls(operation, inputs)
        except ConfigError as error:
            _skip(selection.backend.name, workload, str(error))
            continue
        name = selection.backend.name
        options = {key: value for key, value in vars(selection.options).items() if key != "name"}
        yield _row(name, operation, inputs, own, graph, ceilings, options)
        for peer in config.bench.peers:
            identity = f"{peer} {operation} {workload} {selection.layout} {inputs.spec} {inputs.sizes}"
            if identity in seen:
                continue
            seen.add(identity)
            others = peer_calls(peer, operation, inputs)
            if others is not None:
                # In prefills nobody is captured: backends plan those by their lengths.
                captured = graph or (device.type == "cuda" and config.bench.mode == "auto" and decode)
                part, theirs = others
                package = peer_version(peer)
                yield _row(f"peer:{peer}", part, inputs, theirs, captured, ceilings, {}, **package)


def _row(
    backend: str,
    operation: str,
    inputs: Inputs,
    own: list[Call],
    graph: bool,
    ceilings: Ceilings,
    options: dict[str, Any],
    **more: str,
) -> Row:
    workload, spec, request = inputs.workload, inputs.spec, inputs.selection.request
    us = microseconds(own, inputs.device, graph)
    cost = costs(spec, inputs.selection.layout, workload, request.dtype)[operation]
    record = inputs.selection.backend.record
    packages = {record.distribution: record.version} if not backend.startswith("peer:") else more
    return Row(
        op=operation,
        backend=backend,
        kv_format=inputs.selection.layout.window.name,
        shape={
            "heads": spec.num_heads,
            "width": workload.width(spec.model),
            "tokens": workload.tokens,
            "context": workload.context,
            "hidden": spec.model.hidden_size,
        },
        phase=workload.phase,
        kind=workload.kind.name,
        page=(request.page_sizes.window, request.page_sizes.context),
        mode="graph" if graph else "eager",
        options=options,
        us=round(us, 2),
        gbps=round(cost.bytes / us / 1e3, 2),
        tflops=round(cost.flops / us / 1e6, 3),
        floor_us=round(ceilings.floor_us(cost), 3),
        ceilings={name: round(value, 1) for name, value in asdict(ceilings).items()},
        device=device_name(inputs.device),
        versions=versions() | packages,
    )


def _print(rows: Sequence[Row], ceilings: Ceilings) -> None:
    """A table for each operation and format: rows that read other bytes answer another question."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=_place):
        title = f"{row.op}, {row.phase}, {row.kind}, {row.shape['heads']} heads, {row.kv_format} caches"
        groups.setdefault(title, []).append(row)
    for title, own in groups.items():
        table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left")
        for column in ("tokens", "context", "µs", "GB/s", "TFLOP/s", "of floor"):
            table.add_column(column, justify="right")
        table.add_column("backend")
        for row in own:
            place = (f"{row.shape['tokens']:,}", f"{row.shape['context']:,}")
            numbers = (f"{row.us:,.1f}", f"{row.gbps:,.1f}", f"{row.tflops:,.2f}", f"{row.share:.0%}")
            table.add_row(*place, *numbers, f"{row.backend} ({row.mode})")
        show(table, "")
    if len({row.kv_format for row in rows}) > 1:
        show("Rows of different cache formats read different bytes; compare them within a table.\n")
    show(
        f"{rows[0].device}: copies at {ceilings.copy_gbps:,.0f} GB/s, multiplies at "
        f"{ceilings.matmul_tflops:,.2f} TFLOP/s; the floor is what bytes and operations take at these."
    )


def _place(row: Row) -> tuple[Any, ...]:
    shape = row.shape
    place = (row.op, row.phase, row.kind, shape["heads"], row.kv_format)
    return (*place, shape["context"], shape["tokens"], row.us)


def _skip(backend: str, workload: Workload, why: str) -> None:
    what = f"{workload.phase} {workload.kind.name}, {workload.tokens} tokens, context {workload.context:,}"
    print(f"dsv4: {backend} left out of {what}: {why}", file=sys.stderr)
