"""The compressor: store projected tokens, pool complete groups into entries."""

from dsv4core.ops.compress.reference import compress

__all__ = ["compress"]
