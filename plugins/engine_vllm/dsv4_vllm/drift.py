"""What the adapter touches of vLLM, and whether it is still there: refused by name where it moved.

None of it is a public interface of vLLM's. The versions that were read and run are those of `SERVED`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from dsv4core.api import DSV4Error

SERVED = "vLLM 0.32"


class DriftError(DSV4Error):
    """This vLLM is not the one that the adapter was made for."""


@dataclass(frozen=True)
class Touched:
    """A function, method or class of vLLM's that the adapter calls, overrides or reads.

    Attributes:
        module: Where it is.
        name: Its name, `Class.method` for a method.
        parameters: The names of all its parameters, in order; None for a class.
        fields: Fields, methods and properties that are used of a class.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    fields: tuple[str, ...] = ()


_ATTENTION = "vllm.models.deepseek_v4.attention"
_LAYER = ("self", "vllm_config", "prefix", "topk_indices_buffer", "aux_stream_list")
_FORWARD = ("self", "q", "kv", "positions", "output")

COMMON = (
    Touched(_ATTENTION, "DeepseekV4Attention.__init__", _LAYER),
    Touched(_ATTENTION, "DeepseekV4Attention.forward_mqa", _FORWARD),
    Touched(_ATTENTION, "DeepseekV4Attention.get_padded_num_q_heads", ("cls", "num_heads")),
    Touched(_ATTENTION, "DeepseekV4Attention.get_kv_cache_spec", ("self", "vllm_config")),
    Touched(_ATTENTION, "DeepseekV4Attention", fields=("use_fp8_ds_mla_layout",)),
    Touched("vllm.forward_context", "get_forward_context", ()),
    Touched("vllm.forward_context", "ForwardContext", fields=("attn_metadata",)),
    Touched("vllm.model_executor.models.utils", "extract_layer_index", ("layer_name", "num_attn_module")),
    Touched("vllm.distributed.parallel_state", "get_tp_group", ()),
    Touched("vllm.distributed.parallel_state", "GroupCoordinator", fields=("world_size", "cpu_group")),
    Touched("vllm.distributed.parallel_state", "get_tensor_model_parallel_rank", ()),
    Touched("vllm.distributed.parallel_state", "get_tensor_model_parallel_world_size", ()),
    Touched(
        "vllm.v1.attention.backends.mla.sparse_swa",
        "DeepseekSparseSWAMetadata",
        fields=(
            "block_table",
            "slot_mapping",
            "block_size",
            "seq_lens",
            "query_start_loc",
            "token_to_req_indices",
            "num_decodes",
            "num_decode_tokens",
            "num_prefill_tokens",
        ),
    ),
    Touched(
        "vllm.models.deepseek_v4.sparse_mla",
        "DeepseekV4FlashMLAMetadata",
        fields=("block_table", "slot_mapping", "block_size"),
    ),
    Touched("vllm.platforms.interface", "Platform", fields=("is_cpu", "fp8_dtype")),
    Touched(
        "vllm.config.vllm",
        "VllmConfig",
        fields=(
            "additional_config",
            "model_config",
            "cache_config",
            "scheduler_config",
            "parallel_config",
            "compilation_config",
            "speculative_config",
        ),
    ),
    Touched("vllm.config.model", "ModelConfig", fields=("hf_config", "max_model_len", "dtype")),
    Touched(
        "vllm.config.cache",
        "CacheConfig",
        fields=("cache_dtype", "block_size", "user_specified_block_size"),
    ),
    Touched("vllm.config.scheduler", "SchedulerConfig", fields=("max_num_batched_tokens", "max_num_seqs")),
    Touched(
        "vllm.config.parallel", "ParallelConfig", fields=("use_ubatching", "decode_context_parallel_size")
    ),
    Touched("vllm.config.compilation", "CompilationConfig", fields=("cudagraph_mode",)),
    Touched(
        "vllm.config.compilation",
        "CUDAGraphMode",
        fields=("has_full_cudagraphs", "mixed_mode", "decode_mode"),
    ),
)
_CPU = "vllm.models.deepseek_v4.cpu.cpu_sparse"
CPU = (
    Touched(_CPU, "DeepseekV4CPUAttention.forward_mqa", _FORWARD),
    Touched(_CPU, "DeepseekV4CPUAttention.process_weights_after_loading", ("self", "act_dtype")),
)
ROCM = (Touched("vllm.models.deepseek_v4.amd.rocm", "DeepseekV4ROCMAiterMLAAttention.forward_mqa", _FORWARD),)
CUDA = (
    Touched("vllm.models.deepseek_v4.nvidia.model", "_select_dsv4_attn_cls", ("vllm_config",)),
    Touched("vllm.models.deepseek_v4.nvidia.flashmla", "DeepseekV4FlashMLAAttention.forward_mqa", _FORWARD),
)

ATTRIBUTES = (
    "prefix",
    "attn_sink",
    "rotary_emb.cos_sin_cache",
    "topk_indices_buffer",
    "swa_cache_layer.prefix",
    "swa_cache_layer.kv_cache",
    "compressor",
    "kv_cache",
)
"""What is read of a layer."""
ROTATES_BACK = "_wo_a_fp8_weight"
"""ROCm's layers have it, and where it is None their `forward_mqa` rotates the output back, not `_o_proj`."""

Found = Callable[[Touched], "tuple[str, ...] | None"]


def check(touched: tuple[Touched, ...], found: Found | None = None) -> None:
    """Check that everything is as it was.

    Args:
        touched: What has to be there.
        found: The names of parameters or fields of one of them, None where it is gone; by default those of
            the vLLM that is installed.

    Raises:
        DriftError: Something moved; all that did is named.
    """
    look = found or installed
    moved = [text for one in touched if (text := _difference(one, look(one)))]
    if moved:
        raise DriftError(
            f"dsv4-vllm was made for {SERVED}, and in this one {'; '.join(moved)}. Install {SERVED}, a "
            'dsv4-vllm for your version, or take "dsv4" out of additional_config.'
        )


def check_layer(layer: object) -> None:
    """Check that a layer has what is read of it.

    Raises:
        DriftError: Something is gone.
    """
    rocm = any(base.__name__ == "DeepseekV4ROCMAiterMLAAttention" for base in type(layer).__mro__)
    gone = [name for name in (*ATTRIBUTES, *([ROTATES_BACK] if rocm else [])) if not _has(layer, name)]
    if gone:
        raise DriftError(
            f"dsv4-vllm was made for {SERVED}, and in this one a layer of DeepSeek-V4 has no "
            f"{', '.join(gone)}. Install {SERVED}, or a dsv4-vllm for your version."
        )


def _has(value: object, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def installed(touched: Touched) -> tuple[str, ...] | None:
    """Names of parameters, or of what a class has, in the vLLM that is installed; None where it is gone."""
    try:
        value: Any = importlib.import_module(touched.module)
    except ImportError:
        return None
    for name in touched.name.split("."):
        value = inspect.getattr_static(value, name, None)
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if inspect.isclass(value):
        own = (one.name for one in fields(value)) if is_dataclass(value) else ()
        # Not `dir`, which leaves out an enumeration's methods.
        names = ((*vars(base).get("__annotations__", ()), *vars(base)) for base in value.__mro__)
        return tuple(dict.fromkeys((*own, *(name for group in names for name in group))))
    return tuple(inspect.signature(value).parameters) if callable(value) else None


def _difference(touched: Touched, found: tuple[str, ...] | None) -> str:
    where = f"{touched.module}.{touched.name}"
    if found is None:
        return f"{where} is gone"
    if touched.parameters is not None and found != touched.parameters:
        return f"{where} takes ({', '.join(found)}) and took ({', '.join(touched.parameters)})"
    missing = [name for name in touched.fields if name not in found]
    return f"{where} has no {', '.join(missing)}" if missing else ""
