"""Product with a plain or block-scaled FP8 weight."""

from dsv4core.ops.linear.reference import linear, prepare_linear

__all__ = ["linear", "prepare_linear"]
