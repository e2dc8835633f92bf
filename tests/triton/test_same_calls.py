"""Kernels take what their definitions take, by the same names."""

from __future__ import annotations

import inspect

import pytest

from dsv4core import ops
from dsv4core.ops import triton as kernels

SHARED = sorted(set(kernels.__all__) & set(ops.__all__))


@pytest.mark.parametrize("name", SHARED)
def test_signatures(name: str) -> None:
    assert inspect.signature(getattr(kernels, name)) == inspect.signature(getattr(ops, name))


def test_what_only_one_of_them_has() -> None:
    """Kernels have no single norm; `o_proj` is defined with its product of groups."""
    assert set(ops.__all__) - set(SHARED) == {"Rows", "rms_norm"}
    assert set(kernels.__all__) - set(SHARED) == {"grouped_linear"}
