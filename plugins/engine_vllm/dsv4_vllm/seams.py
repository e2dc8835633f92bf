"""The places where vLLM chooses the attention class of a DeepSeek-V4 layer, one a platform.

vLLM has no official seam for it: its attention registry is not asked for these layers. On a CPU and on ROCm
the model's module names one class; on CUDA a private function of the module picks one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from dsv4_vllm import drift
from dsv4_vllm.options import section

MARK = "_dsv4_vllm"
OURS = "_dsv4_host"

Installer = Callable[[ModuleType], None]


def _class(name: str, touched: tuple[drift.Touched, ...]) -> Installer:
    """An installer for a module that makes layers of the class `name`."""

    def install(module: ModuleType) -> None:
        original = getattr(module, name, None)
        if original is not None and MARK not in vars(original):
            setattr(module, name, _choosing(original, touched))

    return install


def _choosing(original: Any, touched: tuple[drift.Touched, ...]) -> type:
    """A class that stands for `original`, also in `isinstance`, and makes a layer of ours if asked."""

    class Choosing(type(original)):  # type: ignore[misc]
        def __call__(cls, vllm_config: Any, *arguments: Any, **keywords: Any) -> Any:
            chosen = _ours(original, vllm_config, touched) if section(vllm_config) is not None else original
            return chosen(vllm_config, *arguments, **keywords)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    chosen: type = Choosing(original.__name__, (original,), {MARK: original})
    return chosen


def _selector(name: str, touched: tuple[drift.Touched, ...]) -> Installer:
    """An installer for a module whose function `name` returns the class for a configuration."""

    def install(module: ModuleType) -> None:
        original = getattr(module, name, None)
        if original is None or hasattr(original, MARK):
            return

        def select(vllm_config: Any) -> Any:
            chosen = original(vllm_config)
            return chosen if section(vllm_config) is None else _ours(chosen, vllm_config, touched)

        setattr(select, MARK, original)
        setattr(module, name, select)

    return install


def _guard(module: ModuleType) -> None:
    """Refuse a layer that vLLM makes of a class of its own although dsv4core was asked for.

    Otherwise a seam that moved, or a platform that has none, would be served by vLLM's default in silence.
    """
    original = getattr(module, "DeepseekV4Attention", None)
    if original is None or MARK in vars(original):
        return
    build = original.__init__

    @functools.wraps(build)
    def __init__(self: Any, vllm_config: Any, *arguments: Any, **keywords: Any) -> None:
        if section(vllm_config) is not None and not hasattr(type(self), OURS):
            raise drift.DriftError(
                f"vLLM made a layer of {type(self).__module__}.{type(self).__name__} although "
                'additional_config["dsv4"] asks for dsv4core: dsv4-vllm has no seam there. It serves the '
                f"CPU, CUDA and ROCm models of DeepSeek-V4 in {drift.SERVED}; take it out to use vLLM's own."
            )
        build(self, vllm_config, *arguments, **keywords)

    original.__init__ = __init__
    setattr(original, MARK, build)


def _ours(base: Any, vllm_config: Any, touched: tuple[drift.Touched, ...]) -> Any:
    from dsv4_vllm.attention import attention_class

    return attention_class(base, vllm_config, (*drift.COMMON, *touched))


SEAMS: Mapping[str, Installer] = MappingProxyType(
    {
        "vllm.models.deepseek_v4.attention": _guard,
        "vllm.models.deepseek_v41.attention": _guard,
        "vllm.models.deepseek_v4.cpu.model": _class("DeepseekV4CPUAttention", drift.CPU),
        "vllm.models.deepseek_v4.amd.model": _class("DeepseekV4ROCMAiterMLAAttention", drift.ROCM),
        "vllm.models.deepseek_v4.nvidia.model": _selector("_select_dsv4_attn_cls", drift.CUDA),
    }
)
"""Modules of vLLM, and what to do when one is imported."""
