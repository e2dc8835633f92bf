"""The operations of DeepSeek-V4 attention, one folder each.

`reference.py` is the operation's definition in plain torch: every kernel is held against it. Each folder's
`__init__` is the public call.
"""

from dsv4core.ops.compress import compress
from dsv4core.ops.gather_rows import gather_rows
from dsv4core.ops.indexer import index_logits, index_query, index_topk
from dsv4core.ops.inverse_rope_quant import inverse_rope_quant
from dsv4core.ops.linear import linear, prepare_linear
from dsv4core.ops.norm import latent_norms, rms_norm
from dsv4core.ops.o_proj import o_proj
from dsv4core.ops.qk_norm_rope_insert import qk_norm_rope_insert
from dsv4core.ops.sparse_indices import (
    entry_slots,
    gathered_indices,
    mixed_sparse_indices,
    query_lengths,
    visible_entries,
    visible_slots,
    window_slots,
)
from dsv4core.ops.sparse_mla import Rows, sparse_mla

__all__ = [
    "Rows",
    "compress",
    "entry_slots",
    "gather_rows",
    "gathered_indices",
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
    "rms_norm",
    "sparse_mla",
    "visible_entries",
    "visible_slots",
    "window_slots",
]
