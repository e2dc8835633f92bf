"""The named presets that lie in `conf/`: of the model's sizes, the workload and the benchmark."""

from __future__ import annotations

from pathlib import Path

CONF = Path(__file__).parent / "conf"
PRESET_GROUPS = ("model", "workload", "bench")


def presets(group: str) -> list[str]:
    """The names that `<group>=` takes."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))
