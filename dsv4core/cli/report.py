"""What `dsv4 run` tells at the end: a table for people, JSON for machines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from dsv4core.api.kvcache import KVCacheLayout
from dsv4core.api.layer import LayerSpec
from dsv4core.attention import OPERATIONS
from dsv4core.cli.output import show, show_json
from dsv4core.cli.tokens import Tokens
from dsv4core.cli.verify import Verification
from dsv4core.framework.selection import Selection
from dsv4core.kvcache.pools import bytes_per_token


@dataclass(frozen=True)
class Report:
    """A finished run.

    Attributes:
        selection: The backend and why.
        checkpoint: Where the weights came from.
        specs: The layers that ran.
        tokens: What they were fed.
        prefill_tokens: Prompt tokens of all requests.
        decode_tokens: Decoded tokens of all requests.
        seconds: By phase.
        operations: Seconds by phase and operation.
        cache_bytes: Bytes of all cache pools.
        peak_bytes: Most memory at any time: of the process on a CPU, of torch's allocator on a GPU.
        device: Torch device.
        verification: Errors against the reference, None if it was not asked for.
    """

    selection: Selection
    checkpoint: Path
    specs: tuple[LayerSpec, ...]
    tokens: Tokens
    prefill_tokens: int
    decode_tokens: int
    seconds: Mapping[str, float]
    operations: Mapping[str, Mapping[str, float]]
    cache_bytes: int
    peak_bytes: int
    device: str
    verification: Verification | None

    def rate(self, phase: str) -> float | None:
        """Tokens a second of a phase; None where it had none."""
        tokens = {"prefill": self.prefill_tokens, "decode": self.decode_tokens}[phase]
        return tokens / self.seconds[phase] if tokens else None

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        checked = self.verification
        return {
            "backend": self.selection.backend.name,
            "kv_cache": {
                "window": self.selection.layout.window.name,
                "compressed": self.selection.layout.compressed.name,
                "index": self.selection.layout.index.name,
                "bytes_per_token": bytes_per_token(self.specs, self.selection.layout),
                "pool_bytes": self.cache_bytes,
            },
            "layers": [spec.index for spec in self.specs],
            "prefill_tokens": self.prefill_tokens,
            "decode_tokens": self.decode_tokens,
            "timing": {
                phase: {
                    "seconds": self.seconds[phase],
                    "tokens_per_second": self.rate(phase),
                    "operations": dict(self.operations.get(phase, {})),
                }
                for phase in ("prefill", "decode")
            },
            "peak_bytes": self.peak_bytes,
            "verify": None
            if checked is None
            else {
                "compared_with": checked.compared_with,
                "max_abs_err": _finite(checked.max_abs_err),
                "rel_err": _finite(checked.rel_err),
                "tolerance": checked.tolerance,
                "ok": checked.ok,
                "worst_layer": checked.worst_layer,
                "agreement": checked.agreement,
                "least_agreement": checked.least_agreement,
            },
        }


def print_report(report: Report, as_json: bool) -> None:
    """Print a report on stdout."""
    if as_json:
        show_json(report.as_json())
        return
    from rich.table import Table

    table = Table(title="dsv4 run: the attention stack (no MLPs, no output head)", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(report):
        table.add_row(name, value)
    operations = Table(title="milliseconds by operation, all steps together")
    operations.add_column("operation", style="bold")
    for phase in ("prefill", "decode"):
        operations.add_column(phase, justify="right")
        operations.add_column("%", justify="right")
    for cells in _operation_rows(report):
        operations.add_row(*cells)
    show(table, operations)


def _rows(report: Report) -> Iterator[tuple[str, str | Text]]:
    selection, layout = report.selection, report.selection.layout
    backend = selection.backend
    yield (
        "backend",
        f"{backend.name} ({backend.record.source}) on {report.device}: {_why(selection)}",
    )
    yield "checkpoint", str(report.checkpoint)
    kinds = Counter(spec.kind.name for spec in report.specs)
    names = ", ".join(f"{count} {name}" for name, count in kinds.items())
    yield "layers", f"{len(report.specs)}: {names}; activations {selection.request.dtype}"
    yield "tokens", report.tokens.source
    yield "KV caches", _layout(layout)
    per_token = bytes_per_token(report.specs, layout)
    size = human_bytes(report.cache_bytes)
    yield (
        "",
        f"{per_token:,.2f} B a token of context in these layers, besides windows and states; pools of {size}",
    )
    for phase, tokens in (("prefill", report.prefill_tokens), ("decode", report.decode_tokens)):
        rate = report.rate(phase)
        if rate is not None:
            yield phase, f"{rate:,.1f} tokens/s ({tokens} tokens in {report.seconds[phase]:.2f} s)"
    whose = "of the process" if report.device == "cpu" else "of torch's allocator"
    yield "memory", f"{human_bytes(report.peak_bytes)} at most, {whose}"
    if report.verification is not None:
        yield from _verification(report.verification)


def _why(selection: Selection) -> str:
    if selection.asked != "auto":
        return "as asked"
    passed = [
        f"{decision.backend} ({', '.join(reason.code for reason in decision.reasons)})"
        for decision in selection.decisions
        if decision.verdict == "rejected"
    ]
    return f"the first of auto's order that can run this; passed over: {', '.join(passed) or 'none'}"


def _layout(layout: KVCacheLayout) -> str:
    window, index = layout.window, layout.index
    return (
        f"{window.name}, {window.bytes_per_token} B a row; {index.name}, {index.bytes_per_token} B a key; "
        f"{layout.state.parts[0].dtype} compressor state"
    )


def _verification(checked: Verification) -> Iterator[tuple[str, str | Text]]:
    verdict = Text("ok", "green") if checked.ok else Text("FAILED", "red")
    yield (
        "verified",
        verdict + Text(f" against {checked.compared_with}, fed the same layer inputs", "default"),
    )
    yield (
        "",
        f"relative error {checked.rel_err:.2e} (at most {checked.tolerance:.2e}), worst in layer "
        f"{checked.worst_layer}; largest difference {checked.max_abs_err:.2e}",
    )
    if checked.agreement is not None:
        yield (
            "",
            f"{checked.agreement:.2%} of the indexer's choices agree (at least "
            f"{checked.least_agreement:.0%})",
        )


def _operation_rows(report: Report) -> Iterator[list[str]]:
    phases = [report.operations.get(phase, {}) for phase in ("prefill", "decode")]
    totals = [sum(times.values()) for times in phases]
    for name in ("plan", *OPERATIONS):
        if not any(name in times for times in phases):
            continue
        cells = [name]
        for times, total in zip(phases, totals, strict=True):
            cells += (
                [f"{times[name] * 1e3:,.1f}", f"{times[name] / total:.0%}"] if name in times else ["", ""]
            )
        yield cells


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def human_bytes(count: float) -> str:
    """A number of bytes in the largest unit that it reaches, up to GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
