"""The lightning indexer: which compressed entries a query attends."""

from dsv4core.ops.indexer.reference import index_logits, index_query, index_topk, select_entries

__all__ = ["index_logits", "index_query", "index_topk", "select_entries"]
