"""`dsv4 bench`: operations and layers of any backends, and peers, side by side in one run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dsv4core.api import BackendUnavailable, ConfigError
from dsv4core.bench.cost import Ceilings, costs
from dsv4core.bench.gaps import Gap, attempt, device_lost
from dsv4core.bench.inputs import Inputs
from dsv4core.bench.operations import Measured, measured
from dsv4core.bench.peers import PEERS, check_peer, peer_version
from dsv4core.bench.plots import check_plots, plot
from dsv4core.bench.rows import Row, device_name, keep, versions
from dsv4core.bench.timing import cache_bytes, host_microseconds, measure_ceilings, microseconds
from dsv4core.bench.workload import KINDS, Workload
from dsv4core.cli.output import show, show_json_line
from dsv4core.config import DSV4Config
from dsv4core.framework.manager import Backend
from dsv4core.framework.platform import machine_of, torch_device
from dsv4core.framework.request import build_request, configured_shape, select_configured
from dsv4core.framework.selection import Selection
from dsv4core.hydra import compose, expand_sweeps
from dsv4core.libraries import DEEP_GEMM


def bench(words: Sequence[str]) -> int:
    """Measure what a configuration, or the sweep of several, asks for.

    Returns:
        The exit code: 1 where something was tried and failed.

    Raises:
        DSV4Error: The configuration is wrong, or a named backend cannot run any of it.
    """
    configs = [compose(overrides) for overrides in expand_sweeps(words)]
    first = configs[0]
    if first.bench.plot is not None:
        check_plots()
    for name in dict.fromkeys(name for config in configs for name in config.bench.peers):
        check_peer(name)
    device = torch_device(first.device)
    if device.type != "cuda" and any(config.bench.mode == "graph" for config in configs):
        raise ConfigError(
            f"bench.mode=graph captures on a GPU, and device={device.type} is none; use bench.mode=auto."
        )
    for config in configs:  # a mistake in the last one is to be known before the first is measured
        build_request(config, configured_shape(config), machine_of(device), probe="host")
    ceilings = {
        dtype: measure_ceilings(device, getattr(torch, dtype))
        for dtype in {own.dtype: None for own in configs}
    }
    rows: list[Row] = []
    failed = False
    for found in _measured(configs, device, ceilings):
        if isinstance(found, Row):
            rows.append(_kept(found, first))
        else:
            _say(str(found))
            failed |= found.failed
    if not rows and not failed:
        raise ConfigError("Nothing could be measured; the reasons are above.")
    if rows:
        _report(rows, first, ceilings)
    return int(failed)


def _kept(row: Row, config: DSV4Config) -> Row:
    """The row, written where it is to be: at once, since a later one may end the process."""
    options = config.bench
    row = row if options.commit is None else replace(row, commit=options.commit)
    if options.out is not None:
        keep(Path(options.out), [row])
    if config.json:
        show_json_line(asdict(row))
    return row


def _report(rows: Sequence[Row], config: DSV4Config, ceilings: Mapping[str, Ceilings]) -> None:
    if not config.json:
        _print(rows, ceilings)
    if config.bench.plot is not None:
        for file in plot(rows, Path(config.bench.plot)):
            _say(str(file))


def _measured(
    configs: Sequence[DSV4Config], device: torch.device, ceilings: Mapping[str, Ceilings]
) -> Iterator[Row | Gap]:
    """One workload after the other, so that rows that are compared are measured together."""
    seen: set[str] = set()
    pairs = [(place, own, workload) for own in configs for place, workload in enumerate(_workloads(own))]
    tasks = [(config, workload) for _, config, workload in sorted(pairs, key=lambda pair: pair[0])]
    for number, (config, workload) in enumerate(tasks, 1):
        for found in _of_workload(config, workload, device, ceilings[config.dtype], seen):
            yield found
            if isinstance(found, Gap) and found.failed and device_lost(device):
                yield _lost(found, tasks[number:])
                return


def _lost(last: Gap, rest: Sequence[tuple[DSV4Config, Workload]]) -> Gap:
    """What is not run after a failure that the device does not survive."""
    names = [f"{config.backend.name} in {workload}" for config, workload in rest]
    why = "after this only another process can use the device; not run: the rest of this workload"
    if len(names) > 1:
        why += f", and {len(names)} workloads from {names[0]} to {names[-1]}"
    elif names:
        why += f", and {names[0]}"
    return replace(last, why=f"{why}.")


def _workloads(config: DSV4Config) -> Iterator[Workload]:
    options, kinds = config.bench, configured_shape(config).layer_kinds
    for phase, name, context, tokens in product(options.phase, options.kind, options.context, options.tokens):
        kind = KINDS[name]
        yield Workload(phase, kind, tokens, context, max(1, kinds.count(kind)))


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


def _of_workload(
    config: DSV4Config, workload: Workload, device: torch.device, ceilings: Ceilings, seen: set[str]
) -> Iterator[Row | Gap]:
    try:
        selection = _selection(config, workload, device)
    except BackendUnavailable as error:
        yield Gap(config.backend.name, str(workload), str(error))
        return
    name = selection.backend.name
    inputs = attempt(lambda: Inputs(selection, workload, device), name, str(workload))
    if isinstance(inputs, Gap):
        yield inputs
        return
    for operation in config.bench.op:
        yield attempt(
            lambda operation=operation: _own_row(config, operation, inputs, ceilings),  # type: ignore[misc]
            name,
            f"{operation} of {workload}",
        )
        for peer in config.bench.peers:
            asked = (peer, operation, workload, config.bench.mode, config.dtype)
            identity = f"{asked} {selection.layout} {inputs.spec} {inputs.sizes}"
            if operation in PEERS[peer] and identity not in seen:
                seen.add(identity)
                yield attempt(
                    lambda peer=peer, operation=operation: _peer_row(  # type: ignore[misc]
                        config, peer, operation, inputs, ceilings
                    ),
                    f"peer:{peer}",
                    f"{operation} of {workload}",
                )


def _own_row(config: DSV4Config, operation: str, inputs: Inputs, ceilings: Ceilings) -> Row:
    selection = inputs.selection
    timed = _timed(measured(operation, inputs), inputs, selection.request.graph, ceilings)
    record = selection.backend.record
    return Row(
        backend=selection.backend.name,
        model=_model(config),
        options={key: value for key, value in vars(selection.options).items() if key != "name"},
        versions=versions(*_libraries(selection.backend)) | {record.distribution: record.version},
        **timed,
    )


def _libraries(backend: Backend) -> Iterator[str]:
    """Distributions of the kernels that a plugin calls, where they are installed."""
    for requirement in backend.info.requirements:
        yield from (requirement.distribution, *requirement.alternatives)
    if backend.record.distribution != "dsv4core":
        yield from DEEP_GEMM


def _peer_row(config: DSV4Config, peer: str, operation: str, inputs: Inputs, ceilings: Ceilings) -> Row:
    own = PEERS[peer][operation](inputs)
    # In prefills nobody is captured: backends plan those by their lengths.
    decode, mode = inputs.workload.phase == "decode", config.bench.mode
    graph = own.captured and decode and mode != "eager" and inputs.device.type == "cuda"
    timed = _timed(own, inputs, graph, ceilings)
    return Row(
        backend=f"peer:{peer}",
        model=_model(config),
        options={},
        versions=versions() | peer_version(peer),
        **timed,
    )


def _model(config: DSV4Config) -> str:
    return config.model.name if config.checkpoint is None else Path(config.checkpoint).name


def _timed(own: Measured, inputs: Inputs, graph: bool, ceilings: Ceilings) -> dict[str, Any]:
    """Time the calls: all fields of a row but those that say whose they are."""
    workload, spec, request = inputs.workload, inputs.spec, inputs.selection.request
    graph = graph and not own.host
    if own.host:
        us = host_microseconds(own.calls[0], inputs.device)
    else:
        us = microseconds(own.calls, inputs.device, graph)
    cost = costs(spec, own.layout, workload, request.dtype, own.q_dtype)[own.operation]
    return {
        "op": own.operation,
        "dtype": request.dtype,
        "kv_format": own.layout.window.name,
        "shape": {
            "heads": spec.num_heads,
            "width": workload.width(spec.model),
            "tokens": workload.tokens,
            "context": workload.context,
            "hidden": spec.model.hidden_size,
        },
        "phase": workload.phase,
        "kind": workload.kind.name,
        "page": (request.page_sizes.window, request.page_sizes.context),
        "mode": "graph" if graph else "eager",
        "cold": len(own.calls) * cost.bytes >= 2 * cache_bytes(inputs.device),
        "us": round(us, 2),
        "gbps": _digits(cost.bytes / us / 1e3),
        "tflops": _digits(cost.operations / us / 1e6),
        "floor_us": _digits(ceilings.floor_us(cost)),
        "ceilings": {name: _digits(value) for name, value in asdict(ceilings).items()},
        "device": device_name(inputs.device),
    }


def _digits(value: float) -> float:
    """Five of them, however small: rates are divided by each other."""
    return float(f"{value:.5g}")


def _shown(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.2g}"


def _print(rows: Sequence[Row], ceilings: Mapping[str, Ceilings]) -> None:
    """A table for each operation and format: rows that read other bytes answer another question."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=_place):
        step, heads = f"{row.op}, {row.phase}, {row.kind}", f"{row.shape['heads']} heads"
        title = f"{step}, {row.model}, {row.dtype}, {heads}, {row.kv_format} caches"
        groups.setdefault(title, []).append(row)
    for title, own in groups.items():
        table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left")
        for column in ("tokens", "context", "µs", "GB/s", "TFLOP/s", "of floor"):
            table.add_column(column, justify="right")
        table.add_column("backend")
        for row in own:
            place = (f"{row.shape['tokens']:,}", f"{row.shape['context']:,}")
            numbers = (f"{row.us:,.1f}", _shown(row.gbps), _shown(row.tflops), f"{row.share:.0%}")
            table.add_row(*place, *numbers, f"{row.backend} ({row.mode}{'' if row.cold else ', warm'})")
        show(table, "")
    if len({row.kv_format for row in rows}) > 1:
        show("Rows of different cache formats read different bytes; compare them within a table.\n")
    first, *_ = ceilings.values()
    rates = [f"{own.matmul_tflops:,.2f} TFLOP/s ({dtype})" for dtype, own in ceilings.items()]
    if first.fp8_tflops > first.matmul_tflops:
        rates.append(f"{first.fp8_tflops:,.2f} TFLOP/s (FP8)")
    show(
        f"{rows[0].device}: copies at {first.copy_gbps:,.0f} GB/s, multiplies at {' or '.join(rates)}; the "
        "floor is what bytes and operations take at these."
    )


def _place(row: Row) -> tuple[Any, ...]:
    shape = row.shape
    place = (row.op, row.phase, row.kind, row.model, row.dtype, shape["heads"], row.kv_format)
    return (*place, shape["context"], shape["tokens"], row.us)


def _say(text: str) -> None:
    print(f"dsv4: {text}", file=sys.stderr)
