"""Plots of rows: time against batch, time against context, and the roofline. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dsv4core.api import ConfigError
from dsv4core.bench.rows import Row


def check_plots() -> None:
    """Check that plots can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("Plots need matplotlib; run `pip install 'dsv4core[plot]'`.")


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw all plots that the rows are enough for, as PNG.

    Rows of one plot do the same work on the same bytes: operation, model, dtype, heads and format are equal.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, axis, other in (("batch", "tokens", "context"), ("context", "context", "tokens")):
        for subject, group in _groups(rows, lambda row: (*_work(row), row.phase, row.kind)).items():
            for fixed in dict.fromkeys(row.shape[other] for row in group):
                own = [row for row in group if row.shape[other] == fixed]
                if len({row.shape[axis] for row in own}) > 1:
                    file = folder / f"{_file_name(subject)}-{other}{fixed}-by-{name}.png"
                    files.append(_lines(own, axis, f"{', '.join(subject)}, {other} {fixed:,}", file))
    for work, group in _groups(rows, _work).items():
        files.append(_roofline(group, ", ".join(work), folder / f"{_file_name(work)}-roofline.png"))
    return files


def _work(row: Row) -> tuple[str, ...]:
    return (row.op, row.model, row.dtype, f"{row.shape['heads']} heads", row.kv_format)


def _file_name(subject: Sequence[str]) -> str:
    return "-".join(subject).replace(" ", "")


def _groups(
    rows: Sequence[Row], subject: Callable[[Row], tuple[str, ...]]
) -> dict[tuple[str, ...], list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(subject(row), []).append(row)
    return groups


def _lines(rows: Sequence[Row], axis: str, title: str, file: Path) -> Path:
    def draw(axes: Any) -> None:
        for name in dict.fromkeys(_name(row) for row in rows):
            own = sorted((row for row in rows if _name(row) == name), key=lambda row: row.shape[axis])
            axes.plot([row.shape[axis] for row in own], [row.us for row in own], marker="o", label=name)
        floor = sorted({(row.shape[axis], row.floor_us) for row in rows})
        axes.plot(*zip(*floor, strict=True), color="grey", linestyle=":", label="floor")
        axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="µs")
        axes.set_title(title, fontsize=9)
        steps = sorted({row.shape[axis] for row in rows})
        axes.set_xticks(steps, [f"{step:,}" for step in steps])
        axes.minorticks_off()

    return _figure(draw, file)


def _roofline(rows: Sequence[Row], title: str, file: Path) -> Path:
    ceilings = rows[0].ceilings

    def draw(axes: Any) -> None:
        for name in dict.fromkeys(_name(row) for row in rows):
            own = [row for row in rows if _name(row) == name and row.gbps]
            intensity = [row.tflops / row.gbps * 1e3 for row in own]
            axes.scatter(intensity, [row.tflops for row in own], label=name, s=18)
        for rate, style in (("matmul_tflops", ":"), ("fp8_tflops", "-.")):
            ridge = ceilings[rate] / ceilings["copy_gbps"] * 1e3
            points = [ridge / 1000, ridge, ridge * 30]
            roof = [min(x * ceilings["copy_gbps"] / 1e3, ceilings[rate]) for x in points]
            label = f"ceilings of this run ({'FP8' if rate == 'fp8_tflops' else rows[0].dtype})"
            axes.plot(points, roof, color="grey", linestyle=style, label=label)
        axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
        axes.set_title(title, fontsize=9)

    return _figure(draw, file)


def _name(row: Row) -> str:
    """All that may differ between the lines of a plot."""
    window, context = row.page
    options = [f"{name}={value}" for name, value in row.options.items()]
    return ", ".join([row.backend, row.mode, f"pages {window}/{context}", *options])


def _figure(draw: Callable[[Any], None], file: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    draw(axes)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return file
