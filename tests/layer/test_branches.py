"""Parts of a layer where there are no streams."""

from __future__ import annotations

import torch

from dsv4core.branches import side_by_side


def test_one_after_the_other() -> None:
    order: list[int] = []

    def branch(number: int) -> int:
        order.append(number)
        return number

    results = side_by_side([lambda own=own: branch(own) for own in range(3)], torch.device("cpu"), 1)
    assert results == order == [0, 1, 2]
