"""Kernel libraries that several backends use: which is installed, and the command that gets one. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from dsv4core.api import Reason
from dsv4core.api.selection import Probe

DEEP_GEMM = ("sgl-deep-gemm", "tokenspeed-deepgemm")
"""Distributions that are imported as `deep_gemm`; each was built for some versions of torch."""
PRODUCTS = (
    *("fp8_einsum", "fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"),
    "get_num_sms",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
)
"""Functions of DeepGEMM that `dsv4core.ops` calls."""


def installed(distribution: str) -> str | None:
    """Its version, None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version."""
    from packaging.version import Version

    return Version(text).release


def two_of_one_name(found: list[str], module: str, install: str) -> Reason:
    """Why several distributions of one import name are refused."""
    text = f"{' and '.join(found)} are installed, and both write the files of `{module}`."
    return Reason("package-wrong", text, f"Run `pip uninstall {' '.join(found)}`, then `{install}`.")


def deep_gemm_install(torch: str | None) -> str:
    """The command for this version of torch."""
    if torch is not None and release(torch) < (2, 13):
        return "pip install sgl-deep-gemm==0.1.4.post1"
    if torch is not None and release(torch) < (2, 14):
        return "pip install sgl-deep-gemm==0.2.0"
    return "pip install 'sgl-deep-gemm>=0.2.1.post1,<0.3'"


def deep_gemm_reasons() -> Iterator[Reason]:
    """Two builds of DeepGEMM, whose files are mixed."""
    found = [name for name in DEEP_GEMM if installed(name)]
    if len(found) > 1:
        yield two_of_one_name(found, "deep_gemm", deep_gemm_install(installed("torch")))


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
