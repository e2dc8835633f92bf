"""Comparisons that say which row is off, by how much, and what it belongs to."""

from __future__ import annotations

import math

import torch

from dsv4core.api import Step
from dsv4core.kvcache import KVCache
from dsv4core.testing.tolerances import ATTENTION, LSE


def assert_attention(found: torch.Tensor, expected: torch.Tensor, step: Step, q_dtype: str) -> None:
    """Check attention outputs, each query and head by itself.

    Args:
        found: `[tokens, heads, head_dim]`.
        expected: The same, fp64 on the CPU.
        step: The step, to name what is off.
        q_dtype: Dtype of q, for the tolerance.

    Raises:
        AssertionError: A shape differs, or a row is too far off; rows of zeros have to be exactly zero.
    """
    assert_rows(found, expected, ATTENTION[q_dtype], "attention output", step)


def assert_rows(
    found: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float,
    what: str,
    step: Step | None = None,
    floor: float = 1e-3,
) -> None:
    """Check that every row (the last dimension) is within `tolerance` of its norm.

    A row whose norm is less than `floor` of the largest one's counts as that large: fp32 holds no e^-300.

    Raises:
        AssertionError: With the worst row, and how many are off.
    """
    shape, due = tuple(found.shape), tuple(expected.shape)
    assert shape == due, f"The {what} has shape {shape}, and {due} is due."
    found, expected = found.detach().cpu().double(), expected.cpu().double()
    norm = expected.norm(dim=-1)
    error = (found - expected).norm(dim=-1) / norm.clamp_min(floor * norm.max()) if norm.numel() else norm
    exact = torch.where((found == 0).all(-1), 0.0, float("inf"))
    error = torch.where(norm == 0, exact.double(), error)
    # Not `error > tolerance`: NaN is off, too.
    off = ~(error <= tolerance)
    if not off.any():
        return
    worst = error.nan_to_num(nan=float("inf"), posinf=float("inf")).flatten().argmax()
    place = tuple(int(i) for i in torch.unravel_index(worst, error.shape))
    value = float(error[place])
    amount = f"relative error {value:.3g}"
    if float(norm[place]) == 0:
        amount = "it is due to be exactly 0"
    elif math.isnan(value):
        amount = "it is NaN, which is in all that must not be read (-1, rows behind a length, other pages)"
    raise AssertionError(
        f"The {what} is off in {int(off.sum())} of {off.numel()} rows, most at {_place(place, step)}: "
        f"{amount}, allowed is {tolerance:.3g}."
    )


def assert_lse(found: torch.Tensor | None, expected: torch.Tensor, step: Step, q_dtype: str) -> None:
    """Check a log-sum-exp; minus infinity has to be minus infinity.

    Raises:
        AssertionError: With the worst element.
    """
    assert found is not None, "The log-sum-exp was asked for, and None was returned."
    shape, due = tuple(found.shape), tuple(expected.shape)
    assert shape == due, f"The log-sum-exp has shape {shape}, and {due} is due."
    assert found.dtype == torch.float32, f"The log-sum-exp has dtype {found.dtype}, and float32 is due."
    found, tolerance = found.cpu().double(), LSE[q_dtype]
    error = (found - expected).abs() / expected.abs().clamp_min(1.0)
    error = torch.where(found == expected, 0.0, error)  # minus infinity
    off = ~(error <= tolerance)
    if off.any():
        worst = error.nan_to_num(nan=float("inf"), posinf=float("inf")).flatten().argmax()
        place = tuple(int(i) for i in torch.unravel_index(worst, error.shape))
        raise AssertionError(
            f"The log-sum-exp is off in {int(off.sum())} of {off.numel()} elements, most at "
            f"{_place(place, step)}: {float(found[place]):.6g} instead of {float(expected[place]):.6g}."
        )


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Check that two tensors are equal bit for bit, NaN included.

    Raises:
        AssertionError: They are not; `what` begins the sentence.
    """
    equal = found.shape == expected.shape and torch.equal(_bits(found), _bits(expected))
    if not equal:
        count = "all"
        if found.shape == expected.shape:
            count = str(int((_bits(found) != _bits(expected)).sum()))
        raise AssertionError(f"{what}: {count} of {found.nbytes} bytes differ.")


def snapshot(cache: KVCache | None) -> torch.Tensor | None:
    """A copy of the rows of a pool, as bytes."""
    return None if cache is None else torch.cat([region.flatten(1) for region in cache.regions], 1).clone()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _place(place: tuple[int, ...], step: Step | None) -> str:
    names = ("token", "head", "column")
    text = ", ".join(f"{name} {index}" for name, index in zip(names, place, strict=False))
    if step is None or not step.num_tokens:
        return text
    token = place[0]
    return (
        f"{text} (request {int(step.token_to_request[token])}, position {int(step.positions[token])}, "
        f"{'decode' if token < step.num_decode_tokens else 'prefill'})"
    )
