"""Rows of several requests, decoded side by side, for attention that does not read paged pools."""

from dsv4core.ops.gather_rows.reference import gather_rows

__all__ = ["gather_rows"]
