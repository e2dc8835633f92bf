"""Parts of a layer on streams beside each other."""

from __future__ import annotations

import pytest
import torch

from dsv4core.branches import MOST_TOKENS, side_by_side

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]
LAYERS = 20


@pytest.mark.parametrize("tokens", [1, MOST_TOKENS + 1])
def test_replays_of_layers(tokens: int) -> None:
    """Branches that take and free memory; those of each layer need all those of the one before."""
    device = torch.device("cuda")
    x = torch.zeros(1 << 20, device=device)

    def branch(x: torch.Tensor, number: int, weight: int) -> torch.Tensor:
        part = x + number
        for _ in range(5):
            part = part * 1.0
        return part * weight

    def layer(x: torch.Tensor, number: int) -> torch.Tensor:
        branches = [lambda weight=weight: branch(x, number, weight) for weight in (1, 2, 5)]
        first, second, third = side_by_side(branches, device, tokens)
        return (first + second + third) / 8  # exact

    layer(x, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for number in range(LAYERS):
            y = layer(y, number)
    for start in (0, 1000):
        x.fill_(start)
        graph.replay()
        assert torch.equal(y, torch.full_like(y, start + sum(range(LAYERS))))
