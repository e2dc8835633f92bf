"""The grouped low-rank output projection."""

from dsv4core.ops.o_proj.reference import o_proj

__all__ = ["o_proj"]
