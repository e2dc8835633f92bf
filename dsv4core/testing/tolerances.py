"""How far a backend may be from the reference, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from dsv4core.api import LayerPlan

LAYER_OUTPUT: Mapping[str, float] = MappingProxyType(
    {
        # Against fp32 caches: what storing keys costs. An E4M3 code is within 2^-4 of its value, and the
        # worst token of a run comes near that (6.5e-2 in 64 decode steps): a key is both score and value.
        "fp8_ds_mla": 8e-2,
        "fp8_e4m3": 8e-2,
        "bf16": 2e-2,
        "fp32": 1e-5,
        # Against the reference on the same cached bytes: rounding of the activations only.
        "bfloat16": 2e-2,
        "float32": 1e-5,
    }
)
"""Norm of the difference over norm of the output, by cache format or by activation dtype."""

ATTENTION: Mapping[str, float] = MappingProxyType(
    {
        # A kernel rounds its weights and its output to bf16, each with a deviation of 2^-9 / sqrt(3): 1.6e-3
        # together. One key too many of 640 is 4e-2.
        "bfloat16": 2**-7,
        "float16": 2**-7,
        # The order of sums.
        "float32": 1e-5,
        # The weights of the softmax as E4M3, with a deviation of about 2^-5; q is the same on both sides.
        "float8_e4m3fn": 8e-2,
        "float8_e4m3fnuz": 8e-2,
    }
)
"""Norm of the difference over norm of a head's output for one query, by dtype of q, on the same bytes."""

LSE: Mapping[str, float] = MappingProxyType(
    {
        # Scores are summed in fp32 whatever q is: FlashMLA's tests allow 8 / 65536 of the value.
        "bfloat16": 2e-4,
        "float16": 2e-4,
        "float32": 1e-5,
        "float8_e4m3fn": 2e-4,
        "float8_e4m3fnuz": 2e-4,
    }
)
"""Difference of the log-sum-exp, in parts of its magnitude or of 1, whichever is more; by dtype of q."""

CACHED_ROW: Mapping[str, float] = MappingProxyType(
    {
        # A value at the edge between two codes may fall to either side: one of fifty by 2^-3 of itself.
        "float8_e4m3fn": 2e-2,
        "float8_e4m3fnuz": 2e-2,
        "bfloat16": 4e-3,
        "float32": 1e-5,
    }
)
"""Norm of the difference over norm of a written row, by dtype of its first part."""

PROJECTION: Mapping[str, float] = MappingProxyType(
    {
        # FP8 products quantise the attention output and the low-rank rows, each with a deviation of 2.6e-2.
        "bfloat16": 5e-2,
        "float32": 1e-5,
    }
)
"""Norm of the difference over norm of a token's projected row, by activation dtype."""

INDEX_LOGITS = 2e-3
"""Norm of the difference over norm of a query's scores: products of FP8 codes are exact, sums are fp32, and
some kernels add 64 heads in bf16."""


def layer_tolerance(dtype: str, q_dtype: str) -> float:
    """How far a layer's output may be from the reference's on the same bytes.

    Args:
        dtype: Activation dtype's name.
        q_dtype: Dtype of q, by the plan: E4M3 rounds queries, too.
    """
    rounded = ATTENTION[q_dtype] if q_dtype.startswith("float8") else 0.0
    return max(LAYER_OUTPUT[dtype], PROJECTION[dtype]) + rounded


def run_tolerance(dtype: str, plans: Iterable[LayerPlan]) -> float:
    """How far layers of a run may be from the reference's on the same bytes: what their plans round.

    Args:
        dtype: Activation dtype's name.
        plans: Of the layers' kinds.
    """
    most = LAYER_OUTPUT[dtype]
    for plan in plans:
        projected = PROJECTION[dtype] if plan.projection_dtype.startswith("float8") else LAYER_OUTPUT[dtype]
        queries = ATTENTION[plan.q_dtype] if plan.q_dtype.startswith("float8") else 0.0
        most = max(most, projected + queries)
    return most


LEAST_AGREEMENT = 0.9
"""Share of the indexer's choices that must be those of the reference: only near ties may differ."""
