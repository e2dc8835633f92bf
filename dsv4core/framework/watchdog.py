"""Tells which plugin hangs: a hanging import cannot be isolated, but it can be named."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 5.0
"""Seconds. Importing a kernel library that probes its device takes 1 to 3."""


@contextmanager
def watch(what: str, backend: str) -> Iterator[None]:
    """Print one line on stderr if the block takes longer than `PATIENCE`.

    Args:
        what: What is waited for, as the start of a sentence.
        backend: The name that `DSV4_DISABLE` would take.
    """
    text = (
        f"dsv4: {what} has taken {PATIENCE:g} s so far. If it hangs, interrupt it and start again with "
        f"DSV4_DISABLE={backend}."
    )
    # print, not logging: a handler may need the import lock that the plugin holds.
    timer = threading.Timer(PATIENCE, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
