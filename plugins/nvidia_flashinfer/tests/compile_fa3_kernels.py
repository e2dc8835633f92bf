"""Compiles the backend's kernels for sm_90 where there is no GPU; prints their names.

In a process without Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import triton
from dsv4_plugin_flashinfer.apply_sink.triton import _apply, _share
from dsv4_plugin_flashinfer.row_numbers.triton import _number
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    **dict.fromkeys(("requests", "table", "more_table", "selected", "planned", "numbers", "attends"), "*i32"),
    **dict.fromkeys(("lse", "sinks", "shares"), "*fp32"),
    "positions": "*i64",
    "out": "*bf16",
    "scale": "fp32",
}


def compile_for_sm_90(kernel: Any, **constants: Any) -> None:
    """With these constants; None for an argument that is left out."""
    types = {
        name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    triton.compile(ASTSource(kernel, types, places, {}), target=GPUTarget("cuda", 90, 32))
    print(kernel.fn.__name__)


if __name__ == "__main__":
    for chosen in ({}, {"selected": None}, {"selected": None, "ratio": None}):
        compile_for_sm_90(_number, COLUMNS=1024, **chosen)
    for sinks in ({}, {"sinks": None}):
        compile_for_sm_90(_share, COUNT=1024, **sinks)
        compile_for_sm_90(_apply, HEADS=8, WIDTH=512, **sinks)
