"""What AITER launches for the backend's calls, for `tests/triton/compile_kernels.py`: its kernels of Triton.

With a checkout of AITER on the path, and `AITER_TRITON_ONLY=1`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from compile_kernels import TOKENS, Chip
from dsv4_plugin_rocm_aiter import calls as aiter
from dsv4_plugin_rocm_aiter import routes
from dsv4_plugin_rocm_aiter.calls import Pool
from dsv4_plugin_rocm_aiter.ragged import RaggedLists

from dsv4core.kvcache import allocate_cache, cache_layout
from dsv4core.model.shapes import PRESETS

MODEL = PRESETS["v4_flash"]
HEADS = (8, 64, 128)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is a GPU's: AITER's functions ask."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def calls(chip: Chip) -> Iterator[Any]:
    """Decodes of the routes that there are for the chip, in place; prefills; scores of prompts."""
    arch = chip.target.arch
    own = [symbol for symbol in routes.symbols() if arch in symbol.archs and symbol.op == "decode"]
    (decode,) = (symbol for symbol in own if symbol.name in aiter.DECODES)
    lists = RaggedLists.empty(TOKENS, 640, torch.device("cpu"))
    keys = allocate_cache(cache_layout(MODEL, "bf16", "fp8").index, 8, 64)
    codes = torch.zeros(TOKENS, MODEL.index_n_heads, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    pages, visible = torch.zeros(8, dtype=torch.int32), torch.zeros(TOKENS, dtype=torch.int64)
    yield partial(aiter.prompt_logits, codes, codes[..., 0].float(), keys, pages, visible)
    sinks = {heads: torch.empty(heads) for heads in HEADS}
    for heads in HEADS:
        q = torch.empty(TOKENS, heads, 512).bfloat16().as_subclass(OnGpu)
        for name in decode.layouts:
            cache = allocate_cache(cache_layout(MODEL, name, "fp8").window, 2, 64)
            for count in range(1, decode.pools + 1):
                pools = [Pool(cache, lists)] * count
                yield partial(aiter.decode_sparse, decode, q, pools, MODEL.softmax_scale, sinks[heads])
                few = [Pool(cache, lists.of(slice(1)))] * count
                yield partial(aiter.decode_sparse, decode, q[:1], few, MODEL.softmax_scale, sinks[heads])
        if arch == "gfx942":
            yield from prefills(q, lists, sinks[heads])


def prefills(q: torch.Tensor, lists: RaggedLists, sinks: torch.Tensor) -> Iterator[Any]:
    """The smallest and the largest of the blocks that AITER tries."""
    from aiter.ops.triton._triton_kernels.attention import sparse_attention_dsv4 as module

    tuned, rows = module._sparse_attn_prefill_kernel, torch.empty(4096, 512).bfloat16()
    blocks = [(own.kwargs["BLOCK_H"], own.kwargs["BLOCK_K"], own.num_stages) for own in tuned.configs]
    for config in (tuned.configs[blocks.index(pick(blocks))] for pick in (min, max)):

        def launch(config: Any = config) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "_sparse_attn_prefill_kernel", Untuned(tuned.fn, config.all_kwargs()))
                aiter.prefill_kernel(q, rows, lists, MODEL.softmax_scale, sinks)

        yield launch


@dataclass(frozen=True)
class Untuned:
    """A tuned kernel with its blocks given."""

    kernel: Any
    chosen: dict[str, Any]

    def __getitem__(self, grid: Any) -> Any:
        return partial(self.kernel[grid], **self.chosen)
