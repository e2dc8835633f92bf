"""How far a layer's output may be from the reference's, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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

LEAST_AGREEMENT = 0.9
"""Share of the indexer's choices that must be those of the reference: only near ties may differ."""
