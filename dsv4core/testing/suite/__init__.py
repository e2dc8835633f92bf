"""The conformance suite: what a backend has to do, checked by pytest.

    dsv4 check NAME
    pytest --pyargs dsv4core.testing.suite --dsv4-backend NAME

or, in a test file of the backend's own repository, with `dsv4_backend = NAME` in pytest's configuration:

    from dsv4core.testing.suite import *
"""

from importlib import import_module
from typing import Any

MODULES = ("contract", "calls", "caches", "attention", "indexer", "layers", "steps", "hot", "projection")


def checks() -> dict[str, Any]:
    """All checks of the suite by name."""
    modules = [import_module(f"{__name__}.test_{name}") for name in MODULES]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("test_") and getattr(value, "__module__", "") == module.__name__
    }


def __getattr__(name: str) -> Any:
    """The checks, for the star import; they import torch, and `dsv4core.testing` does not."""
    if name == "__all__":
        return list(checks())
    if name.startswith("test_") and name in (found := checks()):
        return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
