"""What a layer's operations give by the definition, in float64 on the CPU, on the bytes that are there.

It shares no code with the operations of `dsv4core.ops`, so that it can judge them, too.
"""

from dsv4core.testing.oracle.attention import attend, project
from dsv4core.testing.oracle.indexer import best_entries, entry_scores
from dsv4core.testing.oracle.writing import entry, keys, queries

__all__ = ["attend", "best_entries", "entry", "entry_scores", "keys", "project", "queries"]
