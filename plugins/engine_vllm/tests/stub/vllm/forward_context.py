"""The context of one forward pass."""

from types import SimpleNamespace

_current = None


def set_forward_context(attn_metadata):
    """Begin a forward pass."""
    global _current
    _current = SimpleNamespace(attn_metadata=attn_metadata)


def get_forward_context():
    """The current context."""
    return _current
