"""`compress` by kernels in CuTe DSL, which are compiled once for each kind of layer and format of rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_ptr

from dsv4_plugin_flashinfer.compress import kernels
from dsv4core.api import LayerKind, Step
from dsv4core.kvcache import KVCache

TYPES = {
    torch.float32: (cutlass.Float32, 16),
    torch.bfloat16: (cutlass.BFloat16, 16),
    torch.float8_e4m3fn: (cutlass.Float8E4M3FN, 16),
    torch.int32: (cutlass.Int32, 4),
    torch.int64: (cutlass.Int64, 8),
}
"""Of elements, and bytes that a tensor is aligned to."""


def compress(
    projected: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    rope: torch.Tensor,
    eps: float,
    kind: LayerKind,
    step: Step,
    state: KVCache,
    entries: KVCache,
) -> None:
    """As the definition, for entries of 512 channels in plain bf16 or E4M3 rows.

    Args: as of the definition; `ape` and `norm_weight` fp32, all side by side.
    """
    tokens = len(projected)
    if not tokens:
        return
    if projected.stride(0) % kernels.CHANNELS or projected.data_ptr() % 16:
        projected = projected.clone(memory_format=torch.contiguous_format)
    states, table = step.state[kind.name], step.compressed[kind.name]
    chip = torch.cuda.get_device_capability(projected.device)
    decodes = step.num_decode_requests == step.num_requests
    kernel = compiled(entries.pool.dtype, entries.scale is not None, kind, decodes, chip)
    kernel(
        *map(
            _pointer_to,
            (
                *(projected, ape, step.positions, step.token_to_request, step.query_start_loc),
                *(table.slot_mapping, states.block_table, state.pool, states.slot_mapping),
                *(norm_weight, rope, entries.pool, norm_weight if entries.scale is None else entries.scale),
            ),
        ),
        tokens,
        projected.stride(0),
        states.block_table.stride(0),
        state.pool.stride(0),
        state.page_size,
        entries.pool.stride(0),
        entries.page_size,
        eps,
        CUstream(torch.cuda.current_stream(projected.device).cuda_stream),
    )


@lru_cache
def compiled(dtype: torch.dtype, scaled: bool, kind: LayerKind, keeps: bool, chip: tuple[int, int]) -> Any:
    """The kernels of a format and a kind, for the current device, a `chip`: `keeps` where all decode.

    Takes what `kernels.launch` takes, without its constants.
    """
    f32, i32, i64 = torch.float32, torch.int32, torch.int64
    types = (f32, f32, i64, i32, i32, i64, i32, f32, i64, f32, f32, dtype)
    pointers = (*(_pointer(own, 16) for own in types), _pointer(f32, 16, 4))
    numbers = (Int32(1), Int64(8), Int64(1), Int64(8), Int32(1), Int64(8), Int32(1), Float32(1e-6))
    assert kind.ratio is not None
    # A group of 128 rows is shared by four times as many threads.
    splits, batch = (1, 8) if kind.state_window <= 8 else (4, 4)
    constants = (kind.groups, kind.ratio, splits, batch, scaled, keeps)
    return cute.compile(kernels.launch, *pointers, *numbers, CUstream(0), *constants)


def _pointer_to(tensor: torch.Tensor) -> Any:
    align = 4 if tensor.dtype == torch.float32 and tensor.numel() == 1 else None
    return _pointer(tensor.dtype, tensor.data_ptr(), align)


@lru_cache(maxsize=4096)
def _pointer(dtype: torch.dtype, address: int, align: int | None = None) -> Any:
    """Kept, since making one takes longer than the kernel does."""
    element, usual = TYPES[dtype]
    return make_ptr(element, address, cute.AddressSpace.gmem, assumed_align=align or usual)
