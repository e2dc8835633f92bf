"""Fixtures that several folders share."""

from pathlib import Path

import pytest

from dsv4core.model.random_checkpoint import write_random_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """The tiny checkpoint, written once a session."""
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_random_checkpoint(directory)
    return directory
