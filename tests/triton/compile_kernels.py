"""Compiles every kernel for chips that are not here, and prints `kernel chip format bytes-of-shared-memory`.

Run in a process of its own, without Triton's interpreter: `python tests/triton/compile_kernels.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsv4core.kvcache.codecs_triton import BF16, FP8, FP32, PACKED, SCALED
from dsv4core.ops.compress import triton as compress
from dsv4core.ops.indexer import triton as indexer
from dsv4core.ops.qk_norm_rope_insert import triton as insert

CHIPS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
TYPES = {
    **dict.fromkeys(("q", "kv", "norm_weight", "out"), "*bf16"),
    **dict.fromkeys(("rope", "weights", "logits", "projected", "ape"), "*fp32"),
    **dict.fromkeys(("scale", "q_scale", "entry_scale"), "*fp32"),
    **dict.fromkeys(("positions", "slots", "entry_slots", "visible"), "*i64"),
    **dict.fromkeys(("token_to_request", "query_start_loc", "block_table", "state_table"), "*i32"),
    **dict.fromkeys(("pool", "state_pool", "entry_pool"), "*u8"),
    **dict.fromkeys(("page_stride", "state_page_stride", "entry_page_stride"), "i64"),
    "eps": "fp32",
}
"""Types of arguments by name; the others are 32-bit numbers."""


def cases() -> Iterator[tuple[Any, Mapping[str, Any], Mapping[str, str]]]:
    """Kernels with their constants and the types that differ."""
    for form, fp8 in ((PACKED, False), (BF16, False), (FP8, True), (FP32, False)):
        constants = {"FORMAT": form, "HEADS": insert.HEADS, "WIDTH": 512, "ROPE": 64, "Q_FP8": fp8}
        yield insert._kernel, constants | {"Q_FNUZ": False}, {"out": "*u8"} if fp8 else {}
    for groups, ratio, width, form in ((2, 4, 512, PACKED), (1, 128, 512, BF16), (2, 4, 128, SCALED)):
        sizes = {"GROUPS": groups, "RATIO": ratio, "WIDTH": width}
        yield compress._pool_entries, sizes | {"FORMAT": form, "ROWS": compress.ROWS, "ROPE": 64}, {}
        yield compress._store_states, sizes, {}
    for form in (SCALED, BF16, FP32):
        constants = {"FORMAT": form, "HEADS": 64, "WIDTH": 128, "KEYS": indexer.KEYS, "SPAN": indexer.SPAN}
        yield indexer._score, constants | {"Q_FP8": form == SCALED}, {"q": "*u8"} if form == SCALED else {}


def compiled(kernel: Any, constants: Mapping[str, Any], types: Mapping[str, str], chip: str) -> Any:
    """A kernel for a chip. MI300 has the FNUZ flavour of FP8."""
    names = list(inspect.signature(kernel.fn).parameters)
    values = {**constants, "FNUZ": chip == "gfx942"}
    known = {**TYPES, **types}
    signature = {name: "constexpr" if name in values else known.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in values.items() if name in names}
    return triton.compile(ASTSource(kernel, signature, places), target=CHIPS[chip], options={"num_warps": 4})


if __name__ == "__main__":
    for kernel, constants, types in cases():
        for chip in CHIPS:
            made = compiled(kernel, constants, types, chip)
            print(kernel.fn.__name__, chip, constants.get("FORMAT", "-"), made.metadata.shared, flush=True)
