"""Which FlashMLA and DeepGEMM are installed, and what fits the installed torch: from metadata, first.

Several distributions are imported as `flash_mla`, others as `deep_gemm`; each was built for some versions of
torch. FlashMLA's own repository has had no Hopper kernels and no packed V4 rows since 2026-09-30.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from dsv4core.api import Reason, Requirement
from dsv4core.api.selection import Probe

FLASH_MLA = ("sgl-flash-mla", "tokenspeed-flashmla")
DEEP_GEMM = ("sgl-deep-gemm", "tokenspeed-deepgemm")
NEEDED = {
    "get_mla_metadata": (),
    "flash_mla_with_kvcache": (
        *("indices", "topk_length", "attn_sink"),
        *("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"),
    ),
    "flash_mla_sparse_fwd": ("attn_sink", "topk_length"),
}
"""Functions of FlashMLA, and parameters that builds for DeepSeek-V4 have."""
PRODUCTS = (
    *("fp8_einsum", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata", "get_num_sms"),
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
)
"""Functions of DeepGEMM."""


def requirement() -> Requirement:
    """FlashMLA, by either of its distributions."""
    first, *others = FLASH_MLA
    install = flash_mla_install(installed("torch"))
    return Requirement("flash_mla", first, install, alternatives=tuple(others))


def flash_mla_install(torch: str | None) -> str:
    """The command for this version of torch.

    sgl-flash-mla has torch's stable ABI of 2.10, and asks for 2.14.1 in its metadata.
    """
    if torch is None or _release(torch) >= (2, 14, 1):
        return "pip install 'sgl-flash-mla>=1.0.0,<2'"
    if _release(torch) >= (2, 10):
        return "pip install --no-deps 'sgl-flash-mla>=1.0.0,<2'"
    return "pip install 'torch>=2.14.1' 'sgl-flash-mla>=1.0.0,<2'"


def deep_gemm_install(torch: str | None) -> str:
    """The command for this version of torch."""
    if torch is not None and _release(torch) < (2, 13):
        return "pip install sgl-deep-gemm==0.1.4.post1"
    if torch is not None and _release(torch) < (2, 14):
        return "pip install sgl-deep-gemm==0.2.0"
    return "pip install 'sgl-deep-gemm>=0.2.1.post1,<0.3'"


def flash_mla_reasons(probe: Probe) -> Iterator[Reason]:
    """Why the installed FlashMLA cannot be used, beyond being absent."""
    found = [name for name in FLASH_MLA if installed(name)]
    if len(found) > 1:
        yield _two_of_one_name(found, "flash_mla", flash_mla_install(installed("torch")))
    elif found and probe == "host":
        title, torch = f"{found[0]} {installed(found[0])}", installed("torch")
        fix = f"Run `pip uninstall {found[0]}`, then `{flash_mla_install(torch)}`."
        try:
            lacking = list(_lacking(import_module("flash_mla")))
        except (ImportError, OSError) as error:  # built for another torch: an undefined symbol
            text = f"{title} cannot be imported with torch {torch}: {error}."
            yield Reason("package-version", text, fix)
        else:
            if lacking:
                yield Reason("package-version", f"{title} has no {', '.join(lacking)}.", fix)


def deep_gemm_reasons() -> Iterator[Reason]:
    """Two builds of DeepGEMM, whose files are mixed."""
    found = [name for name in DEEP_GEMM if installed(name)]
    if len(found) > 1:
        yield _two_of_one_name(found, "deep_gemm", deep_gemm_install(installed("torch")))


def _two_of_one_name(found: list[str], module: str, install: str) -> Reason:
    text = f"{' and '.join(found)} are installed, and both write the files of `{module}`."
    return Reason("package-wrong", text, f"Run `pip uninstall {' '.join(found)}`, then `{install}`.")


def _lacking(module: ModuleType) -> Iterator[str]:
    """What a build for DeepSeek-V4 has, and this one has not."""
    for name, wanted in NEEDED.items():
        function = getattr(module, name, None)
        if function is None:
            yield name
            continue
        found = inspect.signature(function).parameters
        yield from (f"{parameter} in {name}" for parameter in wanted if parameter not in found)
    if hasattr(module, "has_legacy") and not module.has_legacy():
        yield "kernels for the rows of DeepSeek-V4 (has_legacy() is false)"


def flavour(module: ModuleType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Further arguments of decode and prefill: sgl-flash-mla has DeepSeek-V4's kernels as legacy ones."""
    if not hasattr(module, "has_legacy"):
        return {}, {}
    return {"use_legacy": True, "kv_format": "V4"}, {"use_legacy": True}


def has_deep_gemm(probe: Probe) -> bool:
    """Whether DeepGEMM can take the output projection and the indexer's scores."""
    return not deep_gemm_lacking(probe)


def deep_gemm_lacking(probe: Probe) -> str:
    """Why DeepGEMM cannot be used, and what to do; empty if it can."""
    found = next((f"{name} {installed(name)}" for name in DEEP_GEMM if installed(name)), "")
    if not found:
        return f"DeepGEMM: `{deep_gemm_install(installed('torch'))}`"
    if probe == "static":
        return ""
    try:
        module = import_module("deep_gemm")
    except Exception as error:  # of another torch, or without nvcc
        text = f"{found} cannot be imported: {type(error).__name__}: {error}"
        return f"{text}; it needs nvcc 12.3 and `{deep_gemm_install(installed('torch'))}`"
    missing = [name for name in PRODUCTS if not hasattr(module, name)]
    install = deep_gemm_install(installed("torch"))
    return f"{found} has no {', '.join(missing)}; `{install}`" if missing else ""


def installed(distribution: str) -> str | None:
    """Its version, None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    from packaging.version import Version

    return Version(text).release
