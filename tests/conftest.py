"""Fixtures that several folders share."""

from pathlib import Path

import pytest

from dsv4core.model.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """The tiny checkpoint, written once a session."""
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_tiny_checkpoint(directory)
    return directory
