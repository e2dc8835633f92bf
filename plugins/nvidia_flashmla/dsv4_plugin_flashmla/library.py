"""Which FlashMLA is installed, and what fits the installed torch: from metadata, first.

Several distributions are imported as `flash_mla`; each was built for some versions of torch. FlashMLA's own
repository has had no Hopper kernels and no packed V4 rows since 2026-09-30.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from dsv4core.api import Reason, Requirement
from dsv4core.api.selection import Probe
from dsv4core.libraries import installed, release, two_of_one_name

FLASH_MLA = ("sgl-flash-mla", "tokenspeed-flashmla")
NEEDED = {
    "get_mla_metadata": (),
    "flash_mla_with_kvcache": (
        *("indices", "topk_length", "attn_sink"),
        *("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"),
    ),
    "flash_mla_sparse_fwd": ("attn_sink", "topk_length"),
}
"""Functions of FlashMLA, and parameters that builds for DeepSeek-V4 have."""


def requirement() -> Requirement:
    """FlashMLA, by either of its distributions."""
    first, *others = FLASH_MLA
    install = flash_mla_install(installed("torch"))
    return Requirement("flash_mla", first, install, alternatives=tuple(others))


def flash_mla_install(torch: str | None) -> str:
    """The command for this version of torch.

    sgl-flash-mla has torch's stable ABI of 2.10, and asks for 2.14.1 in its metadata.
    """
    if torch is None or release(torch) >= (2, 14, 1):
        return "pip install 'sgl-flash-mla>=1.0.0,<2'"
    if release(torch) >= (2, 10):
        return "pip install --no-deps 'sgl-flash-mla>=1.0.0,<2'"
    return "pip install 'torch>=2.14.1' 'sgl-flash-mla>=1.0.0,<2'"


def flash_mla_reasons(probe: Probe) -> Iterator[Reason]:
    """Why the installed FlashMLA cannot be used, beyond being absent."""
    found = [name for name in FLASH_MLA if installed(name)]
    if len(found) > 1:
        yield two_of_one_name(found, "flash_mla", flash_mla_install(installed("torch")))
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
