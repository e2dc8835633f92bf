"""What a run is allowed to be off by: as much as its plans round."""

from __future__ import annotations

import pytest

from dsv4core.api import LayerPlan
from dsv4core.testing.tolerances import ATTENTION, LAYER_OUTPUT, PROJECTION, run_tolerance


def plan(q_dtype: str = "bfloat16", projection_dtype: str = "") -> LayerPlan:
    return LayerPlan(64, q_dtype, projection_dtype=projection_dtype)


def test_plans_that_round_more_are_allowed_more() -> None:
    plain, fp8 = LAYER_OUTPUT["bfloat16"], PROJECTION["bfloat16"]
    assert run_tolerance("bfloat16", [plan()]) == plain
    assert run_tolerance("bfloat16", [plan(), plan(projection_dtype="float8_e4m3fn")]) == fp8
    both = plan("float8_e4m3fn", "float8_e4m3fn")
    assert run_tolerance("bfloat16", [both]) == fp8 + ATTENTION["float8_e4m3fn"]
    assert run_tolerance("float32", [plan("float32")]) == LAYER_OUTPUT["float32"]


def test_a_plan_names_dtypes() -> None:
    with pytest.raises(ValueError, match="projection_dtype 'fp8' is no dtype name; use one of uint8, "):
        plan(projection_dtype="fp8")
