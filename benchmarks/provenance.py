"""Where a measurement comes from: versions, machine, commit and run, alike in every row."""

from __future__ import annotations

import os
import platform
import subprocess
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

RUN_ID = uuid.uuid4().hex[:12]


def provenance(*distributions: str) -> dict[str, Any]:
    """The last fields of a row.

    Args:
        distributions: Those whose versions matter, besides dsv4core.
    """
    versions = {name: version(name) for name in ("dsv4core", *distributions)}
    return {
        "device": f"cpu, {os.cpu_count()} threads, {platform.machine()}",
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit(),
        "run_id": RUN_ID,
    }


def commit() -> str:
    """The checkout's commit, with a mark if files were changed."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
