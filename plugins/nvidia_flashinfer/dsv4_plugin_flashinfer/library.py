"""Whether the installed FlashInfer has what is called, and its kernels are here: from metadata, first."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from dsv4core.api import Reason, Requirement
from dsv4core.api.selection import Probe
from dsv4core.libraries import installed

DISTRIBUTION, VERSIONS = "flashinfer-python", ">=0.6.18,<0.8"
INSTALL = f"pip install '{DISTRIBUTION}{VERSIONS}'"
REQUIREMENT = Requirement("flashinfer", DISTRIBUTION, INSTALL, VERSIONS)
DECODE = "trtllm_batch_decode_sparse_mla_dsv4"
NEEDED = (
    *("query", "swa_kv_cache", "workspace_buffer", "sparse_indices", "compressed_kv_cache"),
    *("sparse_topk_lens", "seq_lens", "out", "bmm1_scale", "bmm2_scale", "sinks", "kv_layout"),
    *("cum_seq_lens_q", "max_q_len", "backend"),
)
OFFSETS = "sparse_indices_are_storage_offsets"
"""The parameter by which indices count rows of a pool's memory, padding of pages included."""
FETCH = "flashinfer download-cubin"
"""Fetches the kernels on a machine with a network."""


def reasons(probe: Probe, arch: str, strided: bool) -> Iterator[Reason]:
    """Why the installed FlashInfer cannot be used, beyond being absent or of another version."""
    if probe != "host" or installed(DISTRIBUTION) is None:
        return
    title = f"{DISTRIBUTION} {installed(DISTRIBUTION)}"
    try:
        module = import_module("flashinfer.mla")
    except Exception as error:  # a compiled dependency of another torch
        text = f"{title} cannot be imported: {type(error).__name__}: {error}."
        fix = f"Run `{INSTALL}` for the installed torch; uninstall a flashinfer-cubin of another version."
        yield Reason("package-version", text, fix)
        return
    lacking = missing_parameters(module)
    if lacking:
        yield Reason("package-version", f"{title} has no {', '.join(lacking)}.", f"Run `{INSTALL}`.")
    elif strided and not counts_storage(module):
        text = f"{title} takes pages without padding, and the host's have some."
        yield Reason("layout", text, f"Run `pip install '{DISTRIBUTION}>=0.7,<0.8'`, or leave pages tight.")
    if not has_cubins():
        text = f"FlashInfer's kernels for {arch} are files that it fetches, and none are here."
        yield Reason("artifact-missing", text, f"Run `{FETCH}` where there is a network.")


def missing_parameters(module: ModuleType) -> list[str]:
    """What is passed, and the function does not take."""
    function = getattr(module, DECODE, None)
    if function is None:
        return [DECODE]
    found = inspect.signature(function).parameters
    return [f"{name} in {DECODE}" for name in NEEDED if name not in found]


def counts_storage(module: ModuleType) -> bool:
    """Whether indices may count rows of a pool whose pages are apart."""
    return OFFSETS in inspect.signature(getattr(module, DECODE)).parameters


def has_cubins() -> bool:
    """Whether attention's kernels lie where FlashInfer looks first, or come with a package."""
    folder = os.environ.get("FLASHINFER_CUBIN_DIR")
    if folder is None and find_spec("flashinfer_cubin") is not None:
        return True
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    found = Path(folder) if folder else base / ".cache" / "flashinfer" / "cubins"
    return found.is_dir() and any("fmha" in str(file).lower() for file in found.rglob("*.cubin"))
