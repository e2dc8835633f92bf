"""What the core's Triton kernels need, for `backend=triton` and for plans with `core_ops="triton"`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from dsv4core.api import Reason, Request, Requirement
from dsv4core.api.selection import Platform
from dsv4core.workspace import CHUNK

TRITON = Requirement(
    module="triton",
    distribution="triton",
    install="pip install 'dsv4core[triton]'",
    version=">=3.6",
    alternatives=("triton-rocm", "pytorch-triton-rocm"),  # what PyTorch's ROCm wheels bring
)
AMD = ("gfx942", "gfx950")
"""AMD's architectures that every kernel is compiled for; nobody has run them there."""
BLOCK = 128
"""Rows and columns of FP8 weights that share a scale."""


def kernel_platforms() -> tuple[Platform, ...]:
    """Where kernels run. A CPU will do where Triton's interpreter is asked for, in tests."""
    interpreted: tuple[Platform, ...] = ("cpu",) if os.environ.get("TRITON_INTERPRET") == "1" else ()
    return ("cuda", "rocm", *interpreted)


def kernel_reasons(request: Request) -> Iterator[Reason]:
    """Why they cannot compute a request: architectures, and sizes that are no powers of two."""
    if request.platform not in kernel_platforms():
        yield Reason(
            "platform", f"The core's kernels are for GPUs, and the request is for {request.platform}."
        )
    small = re.fullmatch(r"sm_(\d+)", request.arch)
    if small and int(small[1]) < 80:
        yield Reason("arch", f"The core's kernels need sm_80 or newer, and this is {request.arch}.")
    if request.platform == "rocm" and request.arch not in AMD:
        text = f"The core's kernels were compiled for {' and '.join(AMD)}, and this is {request.arch}."
        yield Reason("arch", text)
    model = request.model
    sizes = {name: getattr(model, name) for name in ("head_dim", "index_head_dim", "index_n_heads")}
    sizes |= {f"rows of a group of {kind.name}": kind.state_window for kind in model.kinds if kind.ratio}
    for name, size in sizes.items():
        if size & (size - 1):
            code, text = "head-dim" if name == "head_dim" else "model", f"{name} is {size}, and the core's"
            yield Reason(code, f"{text} kernels take powers of two.", "Use backend=reference.")
    if model.o_lora_rank % BLOCK:
        text = f"o_lora_rank is {model.o_lora_rank}, and the core's kernels multiply groups of {BLOCK} rows."
        yield Reason("model", text, "Use backend=reference.")
    if model.index_topk > CHUNK // 2:
        text = f"index_topk is {model.index_topk}, and the core's kernel chooses {CHUNK // 2} at most."
        yield Reason("model", text, "Use backend=reference.")
