"""Scales of plain FP8 caches and queries in a file, as `dsv4 calibrate` measures them. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dsv4core.api import ConfigError, LayerScales

FORMAT = 1


def write_scales(file: Path, scales: Mapping[int, LayerScales]) -> None:
    """Write the scales of layers by index, as JSON."""
    layers = {str(index): {"q": own.q, "kv": own.kv} for index, own in sorted(scales.items())}
    file.write_text(json.dumps({"format": FORMAT, "layers": layers}, indent=1) + "\n", encoding="utf-8")


def read_scales(file: str | Path) -> dict[int, LayerScales]:
    """The scales of layers by index.

    Raises:
        ConfigError: There is no such file, or it is none of `dsv4 calibrate`.
    """
    advice = "write it with `dsv4 calibrate`"
    try:
        text = Path(file).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"scales={file} cannot be read: {error.strerror}; {advice}.") from error
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ConfigError(
                f"scales={file} is of format {content['format']}, and {FORMAT} is read; {advice}."
            )
        return {
            int(index): LayerScales(float(own["q"]), float(own["kv"]))
            for index, own in content["layers"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"scales={file} is no file of scales ({error}); {advice}.") from error
