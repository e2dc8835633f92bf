"""Whether the installed FlashInfer has what is called, and its kernels are here: from metadata, first."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from dsv4core.api import Reason, Requirement
from dsv4core.api.selection import Probe
from dsv4core.libraries import installed

DISTRIBUTION, VERSIONS = "flashinfer-python", ">=0.6.18,<0.8"
INSTALL = f"pip install '{DISTRIBUTION}{VERSIONS}'"
REQUIREMENT = Requirement("flashinfer", DISTRIBUTION, INSTALL, VERSIONS)
FA3_VERSIONS = ">=0.6.18,<0.7"
"""From 0.7 on a plan's scale is where no caller can set it, and the layers of a plan have their own."""
CUTE, CUTE_VERSIONS = "nvidia-cutlass-dsl", ">=4.6.2,<5"
DECODE = "trtllm_batch_decode_sparse_mla_dsv4"
NEEDED = (
    *("query", "swa_kv_cache", "workspace_buffer", "sparse_indices", "compressed_kv_cache"),
    *("sparse_topk_lens", "seq_lens", "out", "bmm1_scale", "bmm2_scale", "sinks", "kv_layout"),
    *("cum_seq_lens_q", "max_q_len", "backend"),
)
TOOLKIT = Path("/usr/local/cuda")
"""Where CUDA's compiler usually is."""
WRAPPER = "BatchMLAPagedAttentionWrapper"
NEEDED_OF_WRAPPER = {
    "__init__": ("float_workspace_buffer", "backend"),
    "plan": (
        *("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv", "head_dim_kpe"),
        *("page_size", "causal", "sm_scale", "q_data_type", "kv_data_type"),
    ),
    "run": (
        *("q_nope", "q_pe", "ckv_cache", "kpe_cache", "out", "lse", "return_lse", "return_lse_base_on_e"),
        *("ckv_scale", "kpe_scale"),
    ),
}
SCALE = "_sm_scale"
"""The attribute in which the wrapper keeps the scale of scores: a layer's is set there."""
OFFSETS = "sparse_indices_are_storage_offsets"
"""The parameter by which indices count rows of a pool's memory, padding of pages included."""
FETCH = "flashinfer download-cubin"
"""Fetches the kernels on a machine with a network."""


def reasons(probe: Probe, arch: str, engine: str, strided: bool) -> Iterator[Reason]:
    """Why the installed FlashInfer cannot be used, beyond being absent or of another version."""
    if probe != "host" or installed(DISTRIBUTION) is None:
        return
    title, install = f"{DISTRIBUTION} {installed(DISTRIBUTION)}", INSTALL
    if engine == "fa3":
        install = f"pip install '{DISTRIBUTION}{FA3_VERSIONS}'"
        if not _fits(DISTRIBUTION, FA3_VERSIONS):
            text = f"{title} is not one of {FA3_VERSIONS}, whose plans take the scales of several layers."
            yield Reason("package-version", text, f"Run `{install}`, which {arch} needs.")
            return
    try:
        module = import_module("flashinfer.mla")
    except Exception as error:  # a compiled dependency of another torch
        text = f"{title} cannot be imported: {type(error).__name__}: {error}."
        fix = f"Run `{install}` for the installed torch; uninstall a flashinfer-cubin of another version."
        yield Reason("package-version", text, fix)
        return
    lacking = missing_of_wrapper(module) if engine == "fa3" else missing_parameters(module)
    if lacking:
        yield Reason("package-version", f"{title} has no {', '.join(lacking)}.", f"Run `{install}`.")
        return
    if engine == "fa3" or installed("flashinfer-jit-cache") is None:  # which has no FA3 for keys in one part
        yield from _compiler_reasons(arch)
    if engine != "fa3":
        if strided and not counts_storage(module):
            text, fix = f"{title} takes pages without padding, and the host's have some.", "leave pages tight"
            yield Reason("layout", text, f"Run `pip install '{DISTRIBUTION}>=0.7,<0.8'`, or {fix}.")
        if not has_cubins():
            text = f"FlashInfer's kernels for {arch} are files that it fetches, and none are here."
            yield Reason("artifact-missing", text, f"Run `{FETCH}` where there is a network.")


def _compiler_reasons(arch: str) -> Iterator[Reason]:
    """What FlashInfer compiles at first use: FA3, and what launches TRTLLM-gen's kernels."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT)
    nvcc = shutil.which("nvcc") or any(home and (Path(home) / "bin" / "nvcc").is_file() for home in homes)
    tools = {"nvcc": nvcc, "ninja": shutil.which("ninja")}
    if lacking := [name for name, found in tools.items() if not found]:
        text = (
            f"FlashInfer compiles its kernels for {arch} at their first use, without {' or '.join(lacking)}."
        )
        fix = "Install CUDA's compiler, run `pip install ninja`, or set CUDA_HOME to where nvcc is."
        yield Reason("artifact-missing", text, fix)


def cute_reasons(probe: Probe, platform: str) -> Iterator[Reason]:
    """Why the backend's own kernels cannot be compiled."""
    if platform != "cuda":
        text = f"backend.compressor=cute is for NVIDIA's GPUs, and this is {platform}."
        yield Reason("option", text, "Set backend.compressor=core.")
    elif probe == "host" and not _fits(CUTE, CUTE_VERSIONS):
        found = installed(CUTE)
        is_what = "which is not installed" if found is None else f"and {found} is installed"
        text = f"backend.compressor=cute needs {CUTE}{CUTE_VERSIONS if found else ''}, {is_what}."
        fix = f"Run `pip install '{CUTE}{CUTE_VERSIONS}'`, or set backend.compressor=core."
        yield Reason("package-version" if found else "package-missing", text, fix)


def _fits(distribution: str, versions: str) -> bool:
    from packaging.specifiers import SpecifierSet

    found = installed(distribution)
    return found is not None and SpecifierSet(versions).contains(found, prereleases=True)


def missing_parameters(module: ModuleType) -> list[str]:
    """What is passed, and the function does not take."""
    return _missing(getattr(module, DECODE, None), DECODE, NEEDED)


def missing_of_wrapper(module: ModuleType) -> list[str]:
    """What is passed, and the wrapper's methods do not take."""
    wrapper = getattr(module, WRAPPER, None)
    if wrapper is None:
        return [WRAPPER]
    own = ((getattr(wrapper, name, None), name, needed) for name, needed in NEEDED_OF_WRAPPER.items())
    lacking = [text for one in own for text in _missing(*one)]
    if not lacking and SCALE not in inspect.unwrap(wrapper.run).__code__.co_names:
        lacking = [f"{SCALE} of {WRAPPER}"]
    return lacking


def _missing(function: Callable[..., object] | None, name: str, needed: Sequence[str]) -> list[str]:
    if function is None:
        return [name]
    found = inspect.signature(function).parameters
    return [f"{own} in {name}" for own in needed if own not in found]


def counts_storage(module: ModuleType) -> bool:
    """Whether indices may count rows of a pool whose pages are apart."""
    return OFFSETS in inspect.signature(getattr(module, DECODE)).parameters


def has_cubins() -> bool:
    """Whether the installed FlashInfer's kernels of attention lie where it looks for them."""
    folder = Path(import_module("flashinfer.jit.env").FLASHINFER_CUBIN_DIR)
    own = import_module("flashinfer.artifacts").ArtifactPath.TRTLLM_GEN_FMHA
    return any((folder / own).rglob("*.cubin"))
