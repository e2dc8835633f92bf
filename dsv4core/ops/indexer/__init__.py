"""The lightning indexer: which compressed entries a query attends."""

from dsv4core.ops.indexer.reference import index_logits, index_query, index_topk

__all__ = ["index_logits", "index_query", "index_topk"]
