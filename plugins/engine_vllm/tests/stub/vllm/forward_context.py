"""The context of one forward pass."""

from types import SimpleNamespace

context = SimpleNamespace(attn_metadata=None)


def get_forward_context():
    """The current context."""
    return context
