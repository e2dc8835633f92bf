"""A little of the suite on `backend=triton`, in Triton's interpreter: that takes minutes for a GPU's second.

On a GPU `dsv4 check triton` runs all of it.
"""

from __future__ import annotations

import pytest
import torch

from dsv4core.api import SWA
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite import test_attention, test_caches, test_projection
from dsv4core.testing.suite.test_calls import *  # noqa: F403
from dsv4core.testing.suite.test_contract import *  # noqa: F403
from dsv4core.testing.suite.test_indexer import test_topk  # noqa: F401


@pytest.fixture
def dsv4() -> Subject:
    if torch.cuda.is_available():
        return Subject("triton", device=torch.device("cuda"))
    return Subject("triton", device=torch.device("cpu"), dtype="float32")  # bf16 products are wrong there


@pytest.mark.parametrize("entries", [1, 129])
def test_widths(dsv4: Subject, entries: int) -> None:
    test_attention.test_widths(dsv4, entries)


def test_queries(dsv4: Subject) -> None:
    test_caches.test_queries(dsv4, SWA)


def test_output_projection(dsv4: Subject) -> None:
    test_projection.test_rotating_back_and_projecting(dsv4, 5)
