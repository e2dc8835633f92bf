"""Attention of each query over the rows that its index table names, in one or two paged pools."""

from dsv4core.ops.sparse_mla.reference import Rows, sparse_mla

__all__ = ["Rows", "sparse_mla"]
