"""What a host asks of a backend: a model, a batch's limits, caches, and the poison around them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4core.api import SWA, KVCacheFormat, LayerKind, LayerScales, Limits, ModelShape, PageSizes, Request
from dsv4core.api.kvcache import DTYPE_BYTES
from dsv4core.api.selection import Seam
from dsv4core.kvcache import KVCache, check_cache
from dsv4core.testing.subject import MODEL, Elsewhere, Subject

NAN = 0xFF
"""Poison: bytes of which every format makes NaN (E8M0, E4M3, bf16 and fp32 alike)."""
HUGE = 0x7E
"""Poison: 448 as E4M3, 8e37 as bf16 and fp32."""


@dataclass(frozen=True)
class Case:
    """What a host asks for.

    Attributes:
        kind: The kind of its layers.
        heads: Query heads of the model; 0 stands for the fewest that the backend accepts.
        kv_cache_dtype: As a user would write it.
        index_topk: Width of the table of chosen entries.
        page_sizes: Rows a page.
        page_gap: Pages' alignments of something else's bytes between a pool's pages; needs strided pages.
        spare_pages: Pages of each pool that nobody gets, at its beginning.
        limits: The largest step.
        decode_query_len: Query tokens of a decode request.
        graph: Whether steps are to be captured.
        private_output: Whether the backend may keep its attention output to itself.
        host_lengths: Whether steps have their lengths on the host; None is what the backend needs.
        deterministic: Whether a row's output must not depend on its batch.
        ranks: Ranks that share the heads.
        rank: This one.
        poison: The byte that fills what nobody may read; None leaves that memory untouched.
        sizes: What the layers are but for heads, kinds and `index_topk`.
        others: Further kinds of the model, one layer each.
        scales: Of each layer's FP8 queries, and of its caches where they have one scale.
    """

    kind: LayerKind = SWA
    heads: int = MODEL.num_attention_heads
    kv_cache_dtype: str = "auto"
    index_topk: int = 512
    page_sizes: PageSizes = PageSizes()
    page_gap: int = 0
    spare_pages: int = 1
    limits: Limits = Limits(max_tokens=128, max_requests=8, max_model_len=4096, max_query_len=128)
    decode_query_len: int = 1
    graph: bool = False
    private_output: bool = False
    host_lengths: bool | None = None
    deterministic: bool = False
    ranks: int = 1
    rank: int = 0
    poison: int | None = NAN
    sizes: ModelShape = MODEL
    others: tuple[LayerKind, ...] = ()
    scales: LayerScales = LayerScales()

    @property
    def model(self) -> ModelShape:
        """The model, a layer of each kind."""
        kinds = (self.kind, *self.others)
        return replace(
            self.sizes,
            num_hidden_layers=len(kinds),
            num_attention_heads=self.heads,
            o_groups=math.gcd(self.heads, self.sizes.o_groups),
            index_topk=self.index_topk,
            layer_kinds=kinds,
        )

    def settled(self, subject: Subject) -> Case:
        """The case with the number of heads that it is to have."""
        return self if self.heads else replace(self, heads=subject.few_heads)

    def request(self, subject: Subject, seam: Seam) -> Request:
        """What the host asks of the backend."""
        asked: dict[str, Any] = {} if self.host_lengths is None else {"host_lengths": self.host_lengths}
        return subject.request(
            self.model,
            seam=seam,
            limits=self.limits,
            kv_cache_dtype=self.kv_cache_dtype,
            page_sizes=self.page_sizes,
            strided_pages=self.page_gap > 0,
            decode_query_len=self.decode_query_len,
            tensor_parallel=self.ranks,
            graph=self.graph,
            private_output=self.private_output,
            deterministic=self.deterministic,
            **asked,
        )

    def pool(self, format: KVCacheFormat, pages: int, rows: int, device: torch.device | str) -> KVCache:
        """A pool of poison. Memory that is not filled is not touched: it may be gigabytes.

        Raises:
            Elsewhere: The machine has not that much.
        """
        stride = format.page_bytes(rows) + self.page_gap * format.page_alignment
        try:
            memory = torch.empty(pages * stride, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            raise Elsewhere(f"Here is no room for a pool of {pages * stride / 2**30:.1f} GiB.") from error
        if self.poison is not None:
            memory.fill_(self.poison)
        pool = memory.view(getattr(torch, format.storage_dtype)).as_strided(
            (pages, rows, format.row_width),
            (stride // DTYPE_BYTES[format.storage_dtype], format.row_width, 1),
        )
        scaled = format.scale == "tensor" and self.scales.kv != 1
        scale = torch.full((1,), self.scales.kv, device=device) if scaled else None
        cache = KVCache(pool, format, scale)
        check_cache(cache, f"the host's {format.name} cache")
        return cache
