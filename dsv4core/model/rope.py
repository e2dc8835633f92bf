"""Rotary position embedding: frequencies, tables, and the rotation that every kernel is held against."""

from __future__ import annotations

import math
from weakref import WeakValueDictionary

import torch

from dsv4core.api import RopeParameters, YarnParameters

_tables: WeakValueDictionary[tuple[RopeParameters, int, int, torch.device], torch.Tensor] = (
    WeakValueDictionary()
)


def inverse_frequencies(parameters: RopeParameters, dim: int) -> torch.Tensor:
    """Angle per position of each channel pair: `theta ** (-2i / dim)`, with YaRN's interpolation if asked.

    Computed in fp32 in the order of DeepSeek-V4's official inference/model.py, always on the CPU: far
    positions multiply every rounding, so all devices share these values.

    Returns:
        `[dim // 2]` fp32, radians.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    frequencies = 1.0 / (parameters.theta**exponents)
    if parameters.yarn is None:
        return frequencies
    kept = 1 - _yarn_ramp(parameters.theta, parameters.yarn, dim)
    return frequencies / parameters.yarn.factor * (1 - kept) + frequencies * kept


def rope_table(
    parameters: RopeParameters, dim: int, max_positions: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Cosines and sines by position, the same tensor for all who ask for the same while anybody holds it.

    It takes `4 * dim * max_positions` bytes, so ask for the positions that are served, not for the model's
    maximum. Do not write to it.

    Returns:
        `[max_positions, dim]` fp32 on `device`: the first half of the columns cosines, the second half sines.
    """
    device = torch.empty(0, device=device).device
    key = (parameters, dim, max_positions, device)
    table = _tables.get(key)
    if table is None:
        positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse_frequencies(parameters, dim))
        table = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
        _tables[key] = table
    return table


def rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate the last channels of `x` to their positions, in neighbouring pairs `(2i, 2i + 1)`.

    Args:
        x: `[tokens, ..., width]`; the last `dim` channels are rotated, the others returned as they are.
        positions: `[tokens]` integers in `[0, max_positions)`.
        table: `[max_positions, dim]` as `rope_table` makes it, `dim` at most `width`.

    Returns:
        A tensor like `x`: computed in fp32, rounded once to `x.dtype`.
    """
    cos, sin = table.index_select(0, positions).chunk(2, dim=-1)
    return _rotate_pairs(x, cos, sin)


def rotate_back(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotate`, with the same arguments: rotation by the opposite angle."""
    cos, sin = table.index_select(0, positions).chunk(2, dim=-1)
    return _rotate_pairs(x, cos, -sin)


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate by angles whose cosines and sines are `[tokens, dim // 2]`."""
    dim = 2 * cos.shape[-1]
    turn = torch.complex(cos, sin).view(-1, *[1] * (x.dim() - 2), dim // 2)
    pairs = torch.view_as_complex(x[..., -dim:].float().contiguous().unflatten(-1, (-1, 2)))
    rotated = torch.view_as_real(pairs * turn).flatten(-2)
    return torch.cat((x[..., :-dim], rotated.to(x.dtype)), dim=-1)


def _yarn_ramp(theta: float, yarn: YarnParameters, dim: int) -> torch.Tensor:
    """YaRN's share of interpolation by pair, `[dim // 2]`: 0 for fast pairs, 1 for slow ones.

    A pair that turns `n` times within the original context has number
    `dim * ln(context / (2 pi n)) / (2 ln theta)` (YaRN, arXiv 2309.00071; official inference/model.py).
    """

    def pair(turns: float) -> float:
        context = yarn.original_max_position_embeddings
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(yarn.beta_fast)), 0)
    high = min(math.ceil(pair(yarn.beta_slow)), dim - 1)
    span = max(high - low, 0.001)
    return ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0, 1)
