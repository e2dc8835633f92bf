"""Metadata of window caches."""

from dataclasses import dataclass
from typing import Any


@dataclass
class DeepseekSparseSWAMetadata:
    """One step of one group of window caches."""

    block_table: Any
    slot_mapping: Any
    block_size: int
    seq_lens: Any = None
    query_start_loc: Any = None
    token_to_req_indices: Any = None
    num_decodes: int = 0
    num_prefills: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
