"""Normalise and rotate q; rotate, quantise and store the window's key."""

from dsv4core.ops.qk_norm_rope_insert.reference import qk_norm_rope_insert

__all__ = ["qk_norm_rope_insert"]
