"""Rows of measurements: what they hold, where they come from, and the file that keeps the newest of each."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dsv4core.api import ConfigError

RUN_ID = uuid.uuid4().hex[:12]
IDENTITY = (
    *("op", "backend", "model", "dtype", "kv_format", "shape", "phase", "kind", "page", "mode", "options"),
    "device",
)
"""What makes two rows measurements of the same."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        op: The operation.
        backend: The backend, or `peer:<name>`.
        model: The model's preset, or the folder of its checkpoint.
        dtype: The dtype of activations.
        kv_format: The format of the caches that it read.
        shape: `heads`, `width` (rows that a query attends), `tokens`, `context`, `hidden`.
        phase: `decode`, `prefill` or `mixed`.
        kind: The layer kind.
        page: Rows of a window page and tokens of a context page.
        mode: `graph` or `eager`.
        cold: Whether a round of calls moves so much that the device's cache holds nothing of the last one.
        options: The backend's options.
        us: Microseconds, the median.
        gbps: Bytes that have to move, in 1e9 a second.
        tflops: Operations that have to be done, in 1e12 a second.
        floor_us: What they take at least on this device, by ceilings of the same run.
        ceilings: Those: copy bandwidth, and the rates of products in the activation dtype and in FP8.
        device: The device.
        versions: Of the packages that matter.
        commit: The checkout's commit, empty where there is none.
        run_id: Rows of one run have the same.
    """

    op: str
    backend: str
    model: str
    dtype: str
    kv_format: str
    shape: dict[str, int]
    phase: str
    kind: str
    page: tuple[int, int]
    mode: str
    cold: bool
    options: dict[str, Any]
    us: float
    gbps: float
    tflops: float
    floor_us: float
    ceilings: dict[str, float]
    device: str
    versions: dict[str, str]
    commit: str = field(default_factory=lambda: commit())
    run_id: str = RUN_ID

    @property
    def share(self) -> float:
        """The floor's share of the time: 1 is as fast as the device can be."""
        return self.floor_us / self.us


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads, {platform.machine()}"


def versions(*distributions: str) -> dict[str, str]:
    """Versions of Python, dsv4core, torch and Triton, and of these."""
    found = {"python": platform.python_version()}
    for name in ("dsv4core", "torch", "triton", *distributions):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checkout's commit, with a mark if files were changed."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def provenance(*distributions: str) -> dict[str, Any]:
    """The last fields of a row of other measurements on a CPU, with the versions of these distributions."""
    device = device_name(torch.device("cpu"))
    return {"device": device, "versions": versions(*distributions), "commit": commit(), "run_id": RUN_ID}


def keep(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file of JSON lines, in place of older measurements of the same.

    Raises:
        ConfigError: The file cannot be read as rows, or not be written.
    """
    new = [asdict(row) for row in rows]
    replaced = {_identity(row) for row in new}
    try:
        old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        kept = [row for row in old if _identity(row) not in replaced]
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *new]))
        unfinished.replace(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} cannot hold the rows ({error}); name another file.") from error


def load(path: Path) -> list[Row]:
    """The rows of a file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Row(**{**row, "page": tuple(row["page"])}) for row in rows]


def _identity(row: dict[str, Any]) -> str:
    return json.dumps([row[name] for name in IDENTITY], sort_keys=True)
