"""The context of one forward pass."""

from types import SimpleNamespace

_current = None


class ForwardContext(SimpleNamespace):
    """What a forward pass knows."""

    attn_metadata: object = None


def set_forward_context(attn_metadata):
    """Begin a forward pass."""
    global _current
    _current = ForwardContext(attn_metadata=attn_metadata)


def get_forward_context():
    """The current context."""
    return _current
