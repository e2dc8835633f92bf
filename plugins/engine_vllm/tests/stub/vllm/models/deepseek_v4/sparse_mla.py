"""Metadata of compressed caches."""

from dataclasses import dataclass
from typing import Any


@dataclass
class DeepseekV4FlashMLAMetadata:
    """One step of one group of compressed caches."""

    block_table: Any
    slot_mapping: Any
    block_size: int
