"""The sink's share, taken from outputs that were attended without it."""

from dsv4_plugin_flashinfer.apply_sink.reference import apply_sink, sink_shares

__all__ = ["apply_sink", "sink_shares"]
