"""How far a layer's output may be from the reference's, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LAYER_OUTPUT: Mapping[str, float] = MappingProxyType(
    {
        # Against fp32 caches: what storing keys costs. An E4M3 code is within 2^-4 of its value, and a key is
        # both score and value, so twice that for the worst single token; bf16 rounds q and the output, too.
        "fp8_ds_mla": 2**-3,
        "fp8_e4m3": 2**-3,
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
