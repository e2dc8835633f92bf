"""The operations in Triton kernels, by the names of their definitions; large products are torch's.

Tensors lie on a GPU, or Triton's interpreter runs (`TRITON_INTERPRET=1`). Only `prepare_linear`, which looks
at weights, waits for the device. What a model has to be for them: `dsv4core.framework.kernels`.
"""

from dsv4core.ops.compress.triton import compress
from dsv4core.ops.gather_rows.triton import gather_rows
from dsv4core.ops.indexer.topk_triton import index_topk
from dsv4core.ops.indexer.triton import index_logits, index_query
from dsv4core.ops.inverse_rope_quant.triton import inverse_rope_quant
from dsv4core.ops.linear.triton import grouped_linear, linear, prepare_linear
from dsv4core.ops.norm.triton import latent_norms
from dsv4core.ops.o_proj.triton import o_proj
from dsv4core.ops.qk_norm_rope_insert.triton import qk_norm_rope_insert
from dsv4core.ops.sparse_indices.triton import (
    entry_slots,
    gathered_indices,
    mixed_sparse_indices,
    query_lengths,
    visible_entries,
    visible_slots,
    window_slots,
)
from dsv4core.ops.sparse_mla.triton import sparse_mla

__all__ = [
    "compress",
    "entry_slots",
    "gather_rows",
    "gathered_indices",
    "grouped_linear",
    "index_logits",
    "index_query",
    "index_topk",
    "inverse_rope_quant",
    "latent_norms",
    "linear",
    "mixed_sparse_indices",
    "o_proj",
    "prepare_linear",
    "qk_norm_rope_insert",
    "query_lengths",
    "sparse_mla",
    "visible_entries",
    "visible_slots",
    "window_slots",
]
