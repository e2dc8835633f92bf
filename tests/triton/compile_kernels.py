"""Compiles every launch of the operations for a chip that is not here; prints kernels, and what they take.

    python tests/triton/compile_kernels.py gfx942
    python tests/triton/compile_kernels.py gfx942 launches.py

in a process without Triton's interpreter; with a file, what its `calls(chip)` launch instead. Operations are
called with tensors of a model's sizes; launches are recorded instead of run, and each is compiled as it
would be on the chip. A line is a kernel, its bytes of shared memory, and the matrix instructions in the
assembly of AMD's chips. What is printed holds for the Triton that is installed.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dsv4core.api import C4A, C128A, CacheTable, KVCacheFormat, Limits, ModelShape, Step, Weight
from dsv4core.kvcache import KVCache, allocate_cache, cache_layout, with_fp8_flavour
from dsv4core.model.shapes import PRESETS
from dsv4core.ops import triton as kernels
from dsv4core.ops.indexer import triton as indexer
from dsv4core.ops.linear import triton as linear
from dsv4core.ops.sparse_mla import Rows, schedule_triton
from dsv4core.ops.sparse_mla import triton as attention

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "waves_per_eu", "matrix_instr_nonkdim")
TOKENS, BF16 = 32, torch.bfloat16


@dataclass(frozen=True)
class Chip:
    """What a chip has that launches depend on."""

    target: GPUTarget
    flavour: str
    multiplies: tuple[torch.dtype, ...]
    shared_memory: int

    @property
    def nvidia(self) -> bool:
        return bool(self.target.backend == "cuda")


CHIPS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), "e4m3fn", (), 163 << 10),
    "sm_86": Chip(GPUTarget("cuda", 86, 32), "e4m3fn", (), 99 << 10),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), "e4m3fn", (torch.float8_e4m3fn,), 227 << 10),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), "e4m3fnuz", (torch.float8_e4m3fnuz,), 132 << 10),
    "gfx950": Chip(GPUTarget("hip", "gfx950", 64), "e4m3fn", (torch.float8_e4m3fn,), 132 << 10),
}


@dataclass(frozen=True)
class Launch:
    """A kernel and all that its compilation depends on."""

    kernel: JITFunction[Any]
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, kernel: JITFunction[Any], *args: Any, **kwargs: Any) -> Launch:
        """As Triton's launcher specialises arguments: 1, multiples of 16, 64 bits where they are needed."""
        values = dict(zip(kernel.arg_names, args, strict=False))
        values |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        types, constants, aligned = {}, {}, []
        for parameter in kernel.params:
            name, value = parameter.name, values[parameter.name]
            if parameter.do_not_specialize:
                types[name] = "i32"
            elif parameter.is_constexpr or value is None or (type(value) is int and value == 1):
                types[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                types[name] = POINTERS[value.dtype]
                aligned.append(name)
            else:
                types[name] = "fp32" if isinstance(value, float) else "i32" if value < 1 << 31 else "i64"
                if isinstance(value, int) and value % 16 == 0:
                    aligned.append(name)
        options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
        return cls(
            kernel,
            *(tuple(own.items()) for own in (types, constants)),
            tuple(aligned),
            tuple(options.items()),
        )

    def compiled(self, chip: Chip) -> tuple[int, list[str]]:
        """Bytes of shared memory of the compiled kernel, and its matrix instructions."""
        names = self.kernel.arg_names
        places = {(names.index(name),): value for name, value in self.constants}
        hints = {(names.index(name),): [["tt.divisibility", 16]] for name in self.aligned}
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = kind(self.kernel, dict(self.types), places, hints)
        kernel = triton.compile(source, target=chip.target, options=dict(self.options))
        found = re.findall(r"\bv_mfma_\w+", kernel.asm.get("amdgcn", ""))
        return int(kernel.metadata.shared), sorted(set(found))


def launches(chip: Chip, every: Callable[[Chip], Iterable[Callable[[], Any]]]) -> list[Launch]:
    """All different launches of calls on a chip."""
    recorded: list[Launch] = []
    JITFunction.run = lambda self, *args, **kwargs: recorded.append(Launch.of(self, *args, **kwargs))
    driver.set_active(SimpleNamespace(get_current_target=lambda: chip.target))
    for module in (indexer, linear, attention):
        module.multiplies_fp8 = lambda device, dtype: dtype in chip.multiplies  # type: ignore[attr-defined]
    for module in (indexer, linear):
        module.stages = lambda device, wanted: wanted if chip.nvidia else 2  # type: ignore[attr-defined]
    for module in (linear, attention):
        module.converts_packed = lambda device: chip.nvidia  # type: ignore[attr-defined]
    schedule_triton._shared_memory = lambda device: chip.shared_memory
    schedule_triton.processors = lambda device: 128
    for call in every(chip):
        call()
    return list(dict.fromkeys(recorded))


def calls(chip: Chip) -> Iterator[Any]:
    """Calls of every operation, for a few tokens, with all that decides how kernels are compiled."""
    yield from calls_of(PRESETS["v4_flash"], chip)
    rows, visible = torch.empty(2, 262144), torch.zeros(2, dtype=torch.int64)
    yield partial(kernels.index_topk, rows, visible, PRESETS["v4_pro"].index_topk)


def calls_of(model: ModelShape, chip: Chip) -> Iterator[Any]:
    """The same for one model."""
    heads, rope = model.num_attention_heads, torch.empty(4096, 64)
    positions, requests = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS, dtype=torch.int32)
    table = CacheTable(torch.zeros(TOKENS, 64, dtype=torch.int32), positions, 64)
    formats = {name: cache_layout(model, name, "fp8") for name in ("fp8_ds_mla", "bf16", "fp8_e4m3")}
    q, kv = torch.empty(TOKENS, heads, 512, dtype=torch.bfloat16), torch.empty(TOKENS, 512).bfloat16()
    slots, sinks = torch.zeros(TOKENS, model.index_topk, dtype=torch.int32), torch.empty(heads)
    for name, layout in formats.items():
        window = pool(layout.window, chip)
        insert = partial(kernels.qk_norm_rope_insert, q, kv, positions, rope, window, positions, 1e-6)
        yield insert
        rows = [Rows(window, slots[:, :128]), Rows(window, slots)]
        attend = partial(kernels.sparse_mla, softmax_scale=model.softmax_scale)
        yield partial(attend, q, rows, sinks=sinks)
        yield partial(attend, q[:1, :8], rows[:1], want_lse=True)
        workspace = torch.empty(TOKENS, 64, 512, dtype=BF16)
        yield partial(kernels.gather_rows, window, table.block_table, positions, positions, workspace)
        if name == "fp8_e4m3":
            yield partial(insert, q_dtype=torch.float8_e4m3fn, q_scale=torch.ones(1))
        if name == "fp8_ds_mla":
            yield partial(attend, q.float(), rows, sinks=sinks)
            yield partial(attend, q, [rows[0], Rows(window, slots, positions, requests)], sinks=sinks)
            long = torch.zeros(TOKENS, 8192, dtype=torch.int32)
            yield partial(attend, q, [rows[0], Rows(window, long, positions, requests)], sinks=sinks)
            other = Rows(pool(formats["bf16"].window, chip), slots)
            yield partial(attend, q, [rows[0], other], sinks=sinks)
    latent, norms = torch.empty(TOKENS, model.q_lora_rank).bfloat16(), torch.empty(2, model.q_lora_rank)
    yield partial(kernels.latent_norms, latent, kv, norms[0], norms[1, :512], 1e-6)
    layout = formats["fp8_ds_mla"]
    for kind, width, entries in (
        (C4A, 512, layout.compressed),
        (C4A, 128, layout.index),
        (C128A, 512, layout.compressed),
    ):
        size = kind.groups * width
        state, cache = pool(layout.state.resized(size), chip), pool(entries, chip)
        for tokens, decodes in ((TOKENS, TOKENS), (TOKENS, 0), (2048, 0)):
            step = Step(
                *(positions, requests, requests, requests, decodes, decodes, table),
                {kind.name: table},
                {kind.name: table},
                Limits(TOKENS, TOKENS, 4096, 1),
            )
            projected = torch.empty(tokens, 2 * size)
            weights = (torch.empty(kind.ratio or 1, size), torch.empty(width).bfloat16(), rope)
            yield partial(kernels.compress, projected, *weights, 1e-6, kind, step, state, cache)
    index_q = torch.empty(TOKENS, model.index_n_heads, 128).bfloat16()
    for dtype in ("fp8", "bf16", "fp32"):
        query = partial(kernels.index_query, index_q, index_q[..., 0], positions, rope, dtype)
        yield query
        for page_size in (64, 61):
            keys = pool(cache_layout(model, "bf16", dtype).index, chip, page_size)
            found, weights_of = (
                torch.empty(index_q.shape, dtype=indexer.PRECISIONS[dtype]),
                index_q[..., 0].float(),
            )
            yield partial(kernels.index_logits, found, weights_of, keys, table, requests, positions, 4096)
    for width in (256, 16384, 262144):
        yield partial(kernels.index_topk, torch.empty(2, width), positions[:2], model.index_topk)
    place = (requests, table.block_table, 64)
    yield partial(kernels.window_slots, positions, *place, 128)
    yield partial(kernels.entry_slots, torch.zeros(TOKENS, model.index_topk, dtype=torch.int32), *place)
    yield partial(kernels.visible_slots, positions, *place, 8192)
    yield partial(kernels.query_lengths, positions, 128)
    yield partial(kernels.query_lengths, positions, 128, 4, 512)
    yield partial(kernels.visible_entries, positions, model.index_topk)
    gathered = (positions, requests, positions, 64, 512, 128)
    yield partial(kernels.gathered_indices, slots, *gathered)
    yield partial(kernels.gathered_indices, None, *gathered, positions)
    yield partial(kernels.gathered_indices, None, *gathered)
    yield partial(kernels.mixed_sparse_indices, slots[:, :128], slots, (64, 73), (64, 64))
    yield partial(kernels.inverse_rope_quant, q, positions, rope)
    yield partial(kernels.inverse_rope_quant, q, positions, rope, q[..., 0].float())
    groups, low = model.o_groups, model.o_lora_rank
    wo_a, wo_b = weight(groups * low, heads * 512 // groups), weight(model.hidden_size, groups * low)
    wq_b = weight(heads * 512, model.q_lora_rank)
    sizes = ((8, torch.float32), *((tokens, BF16) for tokens in (1, 8, 32, 64, 129, 257)))
    for tokens, dtype in sizes:
        attended, where = torch.empty(tokens, heads, 512, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)
        yield partial(kernels.o_proj, attended, where, rope, wo_a, wo_b, groups)
        yield partial(kernels.linear, torch.empty(tokens, model.q_lora_rank, dtype=dtype), wq_b)


def pool(format: KVCacheFormat, chip: Chip, page_size: int = 64) -> KVCache:
    """A pool in the chip's flavour of FP8, with a scale where the format has one."""
    own = format if format.fp8 is None else with_fp8_flavour(format, chip.flavour)
    return allocate_cache(own, 2, page_size, scale=torch.ones(1) if format.scale == "tensor" else None)


def weight(rows: int, columns: int) -> Weight:
    """A weight as `prepare_linear` leaves it; its memory is not touched."""
    data = torch.empty(rows, columns, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Weight(data, torch.ones(-(-rows // 128), columns // 128), (128, 128))


if __name__ == "__main__":
    chip, *files = sys.argv[1:]
    every = runpy.run_path(files[0])["calls"] if files else calls
    for launch in launches(CHIPS[chip], every):
        shared, products = launch.compiled(CHIPS[chip])
        print(launch.kernel.fn.__name__, shared, *products, flush=True)
