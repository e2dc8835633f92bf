"""Lists of rows of unequal lengths, one behind the other, as AITER's attention takes them (CSR)."""

from dsv4_plugin_rocm_aiter.ragged.reference import RaggedLists, ragged_lists

__all__ = ["RaggedLists", "ragged_lists"]
