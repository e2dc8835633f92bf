"""`dsv4 calibrate`, and runs with its scales."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from dsv4core.api import CheckpointError
from dsv4core.cli.calibrate import HEADROOM, LARGEST, Extremes
from dsv4core.cli.main import main
from dsv4core.model.scales import read_scales

WORDS = ("device=cpu", "prefill=140", "decode=1", "batch=1")


def test_scales_are_measured_and_used(
    tiny_checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Normalised queries have a norm of sqrt(512); rows are cached with less error than without scales."""
    file, words = tmp_path / "scales.json", (f"checkpoint={tiny_checkpoint}", *WORDS)
    assert main(["calibrate", "--out", str(file), *words, "--json"]) == 0
    printed, scales = json.loads(capsys.readouterr().out), read_scales(file)
    assert printed == {str(index): {"q": own.q, "kv": own.kv} for index, own in scales.items()}
    assert len(scales) == 5
    for own in scales.values():
        assert 1 < own.q * LARGEST / HEADROOM < math.sqrt(512) * 1.01
        assert 1 < own.kv * LARGEST / HEADROOM < math.sqrt(512) * 1.01
    shared = ("kv_cache_dtype=fp8_e4m3", "verify=true", "--json")
    assert main(["run", *words, *shared]) == 0
    plain = capsys.readouterr()
    assert "fp8_e4m3 caches have no scales, and 1 is taken" in plain.err
    assert main(["run", *words, *shared, f"scales={file}"]) == 0
    scaled = capsys.readouterr()
    assert "no scales" not in scaled.err
    errors = [json.loads(run.out)["verify"]["rel_err"] for run in (plain, scaled)]
    assert errors[0] != errors[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_values_that_have_no_scale(bad: float, place: int) -> None:
    """First, between others, last."""
    extremes = Extremes()
    for index in range(3):
        extremes.see_queries(torch.tensor([1.0, bad if index == place else 3.0]))
    with pytest.raises(CheckpointError, match="A query or a row is NaN or infinite; calibrate with"):
        extremes.scales()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("calibrate",), "dsv4 calibrate writes a file of scales; name it with --out FILE."),
        (("calibrate", "--out", "x", "verify=true"), "leave out scales=, verify= and kv_cache_dtype=."),
        (
            ("calibrate", "--out", "x", "kv_cache_dtype=fp8"),
            "leave out scales=, verify= and kv_cache_dtype=.",
        ),
        (("calibrate", "--out", "no/where.json"), "--out no/where.json cannot be written; name a file in a"),
        (("run", "device=cpu", "scales=nowhere.json"), "scales=nowhere.json cannot be read: No such file or"),
    ],
)
def test_mistakes(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err
