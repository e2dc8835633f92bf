"""Whole layers of `backend=triton` captured for up to 512 decodes, and replayed for fewer and longer ones."""

from __future__ import annotations

import pytest
import torch

from dsv4core.api import C4A, C128A, SWA, LayerKind
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite.test_hot import PROMPTS, in_one_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]


@pytest.mark.parametrize("kind", [SWA, C4A, C128A], ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 64, 512])
def test_a_graph_for_every_batch(rows: int, kind: LayerKind) -> None:
    prompts = (*PROMPTS, *(3 + 7 * request % 31 for request in range(rows)))[:rows]
    counts = (rows, rows, rows // 2 + 1, 1, rows)
    in_one_graph(Subject("triton", device=torch.device("cuda")), kind, prompts, counts)
