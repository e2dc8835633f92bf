"""Compiles every kernel for chips that are not here, and prints `kernel chip shared-memory number`.

Run in a process of its own, without Triton's interpreter: `python tests/triton/compile_kernels.py`. What it
says holds for the Triton that is installed.
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
from dsv4core.ops.indexer import topk_triton as topk
from dsv4core.ops.indexer import triton as indexer
from dsv4core.ops.inverse_rope_quant import triton as quant
from dsv4core.ops.linear import triton as linear
from dsv4core.ops.qk_norm_rope_insert import triton as insert
from dsv4core.ops.sparse_indices import triton as tables
from dsv4core.ops.sparse_mla import triton as attention

CHIPS = {
    "sm_86": GPUTarget("cuda", 86, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
TYPES = {
    **dict.fromkeys(("q", "kv", "norm_weight", "out", "x", "attention"), "*bf16"),
    **dict.fromkeys(("rope", "weights", "logits", "projected", "ape", "pooled", "folded"), "*fp32"),
    **dict.fromkeys(("scale", "q_scale", "entry_scale", "scales", "values", "best"), "*fp32"),
    **dict.fromkeys(("positions", "slots", "entry_slots", "state_slots", "visible"), "*i64"),
    **dict.fromkeys(("token_to_request", "query_start_loc", "block_table", "state_table"), "*i32"),
    **dict.fromkeys(("numbers", "names", "requests", "table", "entries", "selected", "lengths"), "*i32"),
    **dict.fromkeys(("window", "compressed", "more_slots"), "*i32"),
    **dict.fromkeys(("pool", "state_pool", "entry_pool", "more_pool", "weight", "codes"), "*u8"),
    **dict.fromkeys(("page_stride", "state_page_stride", "entry_page_stride", "more_page_stride"), "i64"),
    **dict.fromkeys(("eps", "factor", "least", "softmax_scale"), "fp32"),
}
"""Types of arguments by name; the others are 32-bit numbers."""
CODES = {"out": "*u8"}

Case = tuple[Any, Mapping[str, Any], Mapping[str, str], int]


def cases(chip: str) -> Iterator[Case]:
    """Kernels with their constants, the types that differ, and stages; each as it is launched on the chip."""
    yield from _writers()
    yield from _indexer(chip)
    yield from _tables()
    yield from _products(chip)
    yield from _attention(chip)


def _writers() -> Iterator[Case]:
    for form, fp8 in ((PACKED, False), (FP8, True)):
        constants = {"FORMAT": form, "HEADS": insert.HEADS, "WIDTH": 512, "ROPE": 64, "Q_FP8": fp8}
        own = {"scale": None, "q_scale": None} if form == PACKED else {}
        yield insert._insert, constants | own | {"Q_FNUZ": False}, CODES if fp8 else {}, 3
    for groups, ratio, width, form in ((2, 4, 512, PACKED), (1, 128, 512, BF16), (2, 4, 128, SCALED)):
        sizes = {"GROUPS": groups, "RATIO": ratio, "WIDTH": width}
        channels = min(width, compress.POOLED // (groups * ratio))
        yield compress._pool, sizes | {"CHANNELS": channels, "TOKENS": 4}, {}, 3
        yield compress._store, sizes | {"FORMAT": form, "ROPE": 64, "entry_scale": None}, {}, 3


def _indexer(chip: str) -> Iterator[Case]:
    for fp8 in (True, False):
        constants = {"HEADS": indexer.HEADS, "WIDTH": 128, "ROPE": 64, "FP8": fp8}
        yield indexer._rotate_queries, constants, CODES if fp8 else {}, 3
    for form, whole in ((SCALED, True), (SCALED, False), (FP32, True)):
        sizes = {"HEADS": 64, "WIDTH": 128, "KEYS": indexer.KEYS, "SPAN": indexer.SPAN, "WHOLE": whole}
        fp8 = form == SCALED
        # Queries are OCP's: with the FNUZ keys of gfx942 they are converted, with gfx950's multiplied.
        constants = {"Q_FP8": fp8, "Q_FNUZ": False, "NATIVE": fp8 and chip == "gfx950", "scale": None}
        types = {"requests": "i32"} | ({"q": "*u8"} if fp8 else {})
        yield indexer._score, sizes | constants | {"FORMAT": form}, types, _stages(chip, indexer.STAGES)
    for size, level, absent in ((128, 0, {"numbers": None, "best": None}), (topk.CHUNK, 1, {})):
        constants = {"CHUNK": topk.CHUNK, "SIZE": size, "MOST": 2048, "LEVEL": level, "GUESSES": topk.GUESSES}
        yield topk._keep_best, constants | absent, {}, 3


def _tables() -> Iterator[Case]:
    constants = {"COLUMNS": tables.COLUMNS}
    yield tables._window, constants, {"window": "i32"}, 3
    yield tables._chosen, constants, {}, 3
    yield tables._all, constants, {}, 3
    yield tables._numbers, constants, {}, 3
    yield tables._mixed, constants, {}, 3


def _products(chip: str) -> Iterator[Case]:
    height, width, _ = linear.LONG
    block, cuda = linear.BLOCK, chip.startswith("sm")
    sizes = {"HEADS": quant.HEADS, "WIDTH": 512, "ROPE": 64, "BLOCK": block}
    yield quant._rotate_back, sizes, CODES | {"scales": "*fp32"}, 3
    yield quant._rotate_back, sizes | {"scales": None}, {}, 3
    yield linear._times_row, {"HEIGHT": height, "WIDTH": width, "BLOCK": block, "NATIVE": False}, {}, 3
    for rows, tokens, dtype in ((64, 16, "*bf16"), (128, 64, "*bf16"), (64, 16, "*fp32")):
        packed, stages = cuda and dtype == "*bf16", _stages(chip, linear.STAGES)
        sizes = {"HEIGHT": rows, "TOKENS": tokens, "BLOCK": block, "PACKED": packed}
        types = {"x": dtype, "out": "*fp32"}
        yield linear._times_rows, sizes, types, stages if dtype == "*bf16" else 1
    yield linear._decode, {"HEIGHT": 16, "WIDTH": 512, "BLOCK": block}, {}, 3


def _attention(chip: str) -> Iterator[Case]:
    few, most = attention.FEW_HEADS, attention.FEW_HEADS if chip == "sm_86" else attention.HEADS
    types = {"sinks": "*fp32", "slots": "*i32", "lse": "*fp32", "scale": "*fp32", "more_scale": "*fp32"}
    types |= dict.fromkeys(("lengths", "more_lengths"), "*i64")
    types |= dict.fromkeys(("table_rows", "more_table_rows"), "*i32")
    for form, heads, dtype in ((PACKED, most, "*bf16"), (BF16, most, "*bf16"), (FP8, few, "*fp32")):
        shift = attention.SHIFT if form == PACKED and chip == "sm_86" else 0
        forms = {"FORMAT": form, "MORE_FORMAT": form, "MORE_FNUZ": False, "SHIFT": shift}
        keys = attention.KEYS if dtype == "*bf16" else attention.KEYS // 2
        sizes = {"HEADS": heads, "KEYS": keys, "WIDTH": 512}
        yield attention._attend, sizes | forms, types | {"q": dtype, "out": dtype}, 1
    types = {"sinks": "*fp32", "parts": "*fp32", "part_lse": "*fp32", "lse": "*fp32"}
    yield attention._merge, {"MOST": attention.MOST_SPLITS, "WIDTH": 512}, types, 3


def _stages(chip: str, wanted: int) -> int:
    return wanted if chip.startswith("sm") else 2


def compiled(case: Case, chip: str) -> Any:
    """A kernel for a chip. MI300 has the FNUZ flavour of FP8."""
    kernel, constants, types, stages = case
    names = list(inspect.signature(kernel.fn).parameters)
    values = {**constants, "FNUZ": chip == "gfx942"}
    known = {**TYPES, **types}
    signature = {name: "constexpr" if name in values else known.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in values.items() if name in names}
    options = {"num_warps": _warps(constants), "num_stages": stages}
    return triton.compile(ASTSource(kernel, signature, places), target=CHIPS[chip], options=options)


def _warps(constants: Mapping[str, Any]) -> int:
    if constants.get("SIZE") == topk.CHUNK:
        return 16
    return 8 if constants.get("HEADS") == attention.HEADS and "SHIFT" in constants else 4


if __name__ == "__main__":
    for chip in CHIPS:
        for number, case in enumerate(cases(chip)):
            print(case[0].fn.__name__, chip, compiled(case, chip).metadata.shared, number, flush=True)
