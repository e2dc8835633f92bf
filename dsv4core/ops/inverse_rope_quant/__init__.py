"""Rotate the attention output back and quantise it for an FP8 output projection."""

from dsv4core.ops.inverse_rope_quant.reference import inverse_rope_quant

__all__ = ["inverse_rope_quant"]
