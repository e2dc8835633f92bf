"""Times the Triton kernels with other constants than theirs: what a chip prefers, and what the notes quote.

    python benchmarks/tune_triton.py [NAME ...]

Names are insert, inverse_rope_quant, index_logits, index_topk, one_row, few_rows, many_rows and sparse_mla.

Prints the fastest choices for each shape, and the time with the constants as they are; of many rows, what
quantised activations would bring, and cost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from types import ModuleType
from typing import Any

import torch

from dsv4core.api import CacheTable, KVCacheFormat, Weight
from dsv4core.bench.timing import Call, microseconds
from dsv4core.fp8 import power_of_two_exponent, to_fp8
from dsv4core.kvcache import KVCache, allocate_cache, cache_layout
from dsv4core.model.rope import rope_table
from dsv4core.model.shapes import PRESETS
from dsv4core.ops.indexer import topk_triton
from dsv4core.ops.indexer import triton as indexer
from dsv4core.ops.inverse_rope_quant import triton as inverse
from dsv4core.ops.linear import triton as linear
from dsv4core.ops.qk_norm_rope_insert import triton as insert
from dsv4core.ops.sparse_mla import schedule_triton
from dsv4core.ops.sparse_mla import triton as attention

DEVICE = torch.device("cuda")
MODEL = PRESETS["v4_flash"]
LAYOUT = cache_layout(MODEL, "fp8_ds_mla", "fp8")
ROPE = rope_table(MODEL.compress_rope, 64, 8192, DEVICE)
BEST = 5


@dataclass(frozen=True)
class Sweep:
    """One kernel.

    Attributes:
        module: Where its constants are.
        constants: The values to try, by name.
        shapes: Arguments of `calls`.
        calls: Makes calls that touch other memory each time.
    """

    module: ModuleType
    constants: Mapping[str, Sequence[Any]]
    shapes: Sequence[tuple[Any, ...]]
    calls: Callable[..., list[Call]]

    def times(self, shape: tuple[Any, ...]) -> Iterator[tuple[float, dict[str, Any]]]:
        """Microseconds with each choice that the device can run; the constants as they are come first."""
        own = {name: getattr(self.module, name) for name in self.constants}
        choices = [
            dict(zip(self.constants, values, strict=True)) for values in product(*self.constants.values())
        ]
        for choice in [own, *choices]:
            vars(self.module).update(choice)
            try:
                yield microseconds(self.calls(*shape), DEVICE, graph=True), choice
            except Exception as error:  # such as too much shared memory
                print(f"  {choice}: {type(error).__name__}", file=sys.stderr)
        vars(self.module).update(own)


def chosen(choice: Any, *_: Any) -> Any:
    """The choice, whatever the call."""
    return choice


@lru_cache(maxsize=2)
def filled(format: KVCacheFormat, pages: int, width: int) -> KVCache:
    """A pool of random rows."""
    cache = allocate_cache(format, pages, 64, DEVICE)
    for slots in torch.arange(pages * 64, device=DEVICE).split(1 << 17):
        cache.write(slots, torch.randn(len(slots), width, device=DEVICE))
    return cache


def scores(rows: int, entries: int) -> list[Call]:
    """Scores of all entries for 64 heads of 128, four requests' tables in turn."""
    pages = 4 * rows * entries // 64
    keys = filled(LAYOUT.index, pages, 128)
    q = torch.randn(rows, 64, 128, device=DEVICE).to(torch.float8_e4m3fn)
    weights, requests = torch.randn(rows, 64, device=DEVICE), torch.arange(rows, device=DEVICE).int()
    visible = torch.full((rows,), entries, device=DEVICE)
    tables = torch.randperm(pages, device=DEVICE).int().view(4, rows, -1)

    def call(table: torch.Tensor) -> Call:
        own = CacheTable(table, visible, 64)
        return lambda: indexer.index_logits(q, weights, keys, own, requests, visible, entries)

    return [call(table) for table in tables]


def choices(rows: int, entries: int, k: int) -> list[Call]:
    """The best of normal scores."""
    visible = torch.full((rows,), entries, device=DEVICE)

    def call(values: torch.Tensor) -> Call:
        return lambda: topk_triton.index_topk(values, visible, k)

    return [call(torch.randn(rows, entries, device=DEVICE)) for _ in range(4)]


def products(tokens: int, rows: int, columns: int) -> list[Call]:
    """Products with four weights in turn."""
    x = torch.randn(tokens, columns, device=DEVICE).bfloat16()

    def call(weight: Weight) -> Call:
        return lambda: linear.linear(x, weight)

    scale = torch.ones(rows // 128, columns // 128, device=DEVICE)
    data = (torch.randn(rows, columns, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(4))
    return [call(Weight(own, scale, (128, 128))) for own in data]


def attended(format: str, tokens: int, heads: int, columns: int) -> list[Call]:
    """Attention over a window and chosen entries, four tables in turn."""
    cache = filled(cache_layout(MODEL, format, "fp8").window, 4096, 512)
    q, sinks = torch.randn(tokens, heads, 512, device=DEVICE).bfloat16(), torch.zeros(heads, device=DEVICE)

    def call() -> Call:
        tables = [torch.randint(4096 * 64, (tokens, width), device=DEVICE).int() for width in (128, columns)]
        rows = [(cache, table) for table in tables]
        division = attention.attention_schedule(q, rows)  # which the layers of a kind share
        return lambda: attention.scheduled_sparse_mla(q, rows, MODEL.softmax_scale, sinks, False, division)

    return [call() for _ in range(4)]


def written(tokens: int) -> list[Call]:
    """Queries and keys of 64 heads, in one packed pool."""
    cache, positions = filled(LAYOUT.window, tokens // 64 + 1, 512), torch.arange(tokens, device=DEVICE)
    q = [torch.randn(tokens, 64, 512, device=DEVICE).bfloat16() for _ in range(2)]

    def call(own: torch.Tensor) -> Call:
        return lambda: insert.qk_norm_rope_insert(own, own[:, 0], positions, ROPE, cache, positions, 1e-6)

    return [call(own) for own in q]


def quantised(tokens: int) -> list[Call]:
    """Heads that attention returns."""
    positions = torch.arange(tokens, device=DEVICE)
    x = [torch.randn(tokens, 64, 512, device=DEVICE).bfloat16() for _ in range(2)]

    def call(own: torch.Tensor) -> Call:
        return lambda: inverse.inverse_rope_quant(own, positions, ROPE)

    return [call(own) for own in x]


SWEEPS = {
    "insert": Sweep(insert, {"HEADS": (2, 4, 8, 16)}, ((8192,),), written),
    "inverse_rope_quant": Sweep(inverse, {"HEADS": (2, 4, 8, 16)}, ((8192,),), quantised),
    "index_logits": Sweep(
        indexer,
        {"KEYS": (64, 128), "SPAN": (256, 512, 1024), "STAGES": (2, 4, 6)},
        ((1, 262144), (32, 16384), (128, 2048)),
        scores,
    ),
    "index_topk": Sweep(
        topk_triton,
        {
            "chunk_size": [partial(max, size) for size in (4096, 8192, 16384)],
            "GUESSES": (0, 6, 12),
            "SCORES_A_WARP": (512, 1024),
        },
        ((1, 262144, 512), (32, 16416, 512), (128, 2048, 512), (1, 262144, 2048)),
        choices,
    ),
    "one_row": Sweep(
        linear,
        {
            "SHORT": ((4, 1024, 2), (8, 512, 2), (8, 1024, 4), (16, 512, 2), (16, 512, 4), (32, 512, 4)),
            "LONG": ((2, 4096, 4), (2, 8192, 4), (4, 2048, 4), (4, 4096, 8), (8, 1024, 4), (8, 2048, 8)),
        },
        ((1, 32768, 1024), (1, 4096, 8192)),
        products,
    ),
    "few_rows": Sweep(
        linear,
        {
            "TILES": [dict.fromkeys(linear.TILES, tile) for tile in product((64, 128), (4, 8), (2, 3, 4))],
            "PROGRAMS": (128, 256),
        },
        tuple((tokens, *size) for tokens in (8, 32, 64, 256) for size in ((32768, 1024), (4096, 8192))),
        products,
    ),
    "sparse_mla": Sweep(
        schedule_triton,
        {
            "_blocks": [
                partial(chosen, schedule_triton.Blocks(*own))
                for own in (
                    *product((64,), (32, 64), (8,), (1, 2, 3)),
                    *product((16,), (32, 64), (4, 8), (2,)),
                )
            ]
        },
        tuple(
            (format, *shape)
            for format in ("fp8_ds_mla", "bf16")
            for shape in ((1, 64, 512), (64, 64, 512), (128, 64, 512), (64, 128, 1024), (64, 16, 512))
        ),
        attended,
    ),
}


def many_rows(tokens: int, rows: int, columns: int) -> None:
    """From codes; a decoded weight and torch's bf16 product; its product of quantised blocks."""
    from torch.nn.functional import ScalingType, scaled_mm

    x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
    blocks = x.float().unflatten(1, (-1, 128))
    scale = torch.ldexp(torch.ones_like(blocks[..., 0]), power_of_two_exponent(blocks.abs().amax(-1)))
    codes, turned = to_fp8(blocks / scale[..., None]).flatten(1), scale.T.contiguous().T
    weight, recipes = torch.randn(rows, columns, device=DEVICE).to(torch.float8_e4m3fn), ScalingType
    ones = torch.ones(rows // 128, columns // 128, device=DEVICE)

    def quantised() -> torch.Tensor:
        how = (turned, recipes.BlockWise1x128, ones.T, recipes.BlockWise128x128)
        return scaled_mm(codes, weight.T, *how, output_dtype=torch.bfloat16)

    own = Weight(weight, ones, (128, 128))
    due = x.float() @ weight.float().T
    ways: dict[str, Call] = {
        "codes": lambda: linear._few(x, own, 1, x.dtype),
        "decoded": lambda: linear._plain(x, linear._decoded(own, x.dtype), x.dtype),
        "quantised": quantised,
    }
    for name, call in ways.items():
        error = float((call().float() - due).norm() / due.norm())
        us = microseconds([call], DEVICE, graph=True)
        print(
            f"many_rows {(tokens, rows, columns)}, {name}: {us:.1f} µs, relative error {error:.1e}",
            flush=True,
        )


def main(names: Sequence[str]) -> None:
    """Sweep the named kernels, all if none is named."""
    if not names or "many_rows" in names:
        for tokens in (256, 512, 4096):
            many_rows(tokens, 32768, 1024)
            many_rows(tokens, 4096, 8192)
    for name in [name for name in names or SWEEPS if name != "many_rows"]:
        for shape in SWEEPS[name].shapes:
            own, *others = SWEEPS[name].times(shape)
            print(f"{name} {shape}: {own[0]:.1f} µs with {own[1]}")
            for us, choice in sorted(others, key=lambda pair: pair[0])[:BEST]:
                print(f"  {us:.1f} µs with {choice}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
