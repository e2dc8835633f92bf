"""Fixtures that several folders share."""

from pathlib import Path

import pytest
import torch

from dsv4core.model.random_checkpoint import write_random_checkpoint

LONGEST = ("test_they_conform", "test_every_launch_compiles")
"""Minutes each; they begin first, so that no process is left waiting for them at the end."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.name.partition("[")[0] not in LONGEST)


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in every run, so that a failure comes back."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """The tiny checkpoint, written once a session."""
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_random_checkpoint(directory)
    return directory
