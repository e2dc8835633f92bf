"""Both norms in one kernel."""

from __future__ import annotations

import pytest
import torch

from dsv4core import ops
from dsv4core.ops.norm.triton import latent_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"))
@pytest.mark.parametrize("widths", [(1024, 512), (1536, 512), (96, 200)])
def test_rows_side_by_side(widths: tuple[int, int], dtype: torch.dtype) -> None:
    """As a product leaves them: rows of one tensor, apart; one of zeros, one tiny, one with a NaN."""
    both = torch.randn(5, sum(widths) + 3, device=DEVICE)
    both[1], both[2, 7] = 0.0, float("nan")
    both[3] *= 1e-3
    latent, kv, _ = both.to(dtype).split([*widths, 3], dim=1)
    weights = [torch.randn(width, device=DEVICE).to(dtype) for width in widths]
    found = latent_norms(latent, kv, *weights, EPS)
    due = ops.latent_norms(latent, kv, *weights, EPS)
    for own, expected in zip(found, due, strict=True):
        assert own.dtype == dtype
        assert own.is_contiguous()
        tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps  # one step of the last place
        torch.testing.assert_close(own, expected, rtol=tolerance, atol=1e-7, equal_nan=True)


def test_no_row() -> None:
    weights = torch.ones(64, device=DEVICE), torch.ones(32, device=DEVICE)
    latent, kv = latent_norms(
        torch.empty(0, 64, device=DEVICE), torch.empty(0, 32, device=DEVICE), *weights, EPS
    )
    assert (latent.shape, kv.shape) == ((0, 64), (0, 32))
