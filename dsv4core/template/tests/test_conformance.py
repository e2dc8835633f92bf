"""dsv4core's conformance suite on this backend; pyproject.toml names it."""

from dsv4core.testing.suite import *  # noqa: F403
