"""Numbers of the rows that queries attend, of two pools in one space."""

from dsv4_plugin_flashinfer.row_numbers.reference import Place, row_numbers

__all__ = ["Place", "row_numbers"]
