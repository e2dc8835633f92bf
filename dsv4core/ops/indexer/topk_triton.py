"""An exact top-k in kernels: the k-th largest score is searched for by counting, in registers.

A short row of scores is one program's. Longer rows are narrowed first: the best of each chunk are the only
ones that can be the best of the row. What is kept lies in ascending order of entry, so that among equal
scores the lowest entries come first on every level.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4core.api.errors import ConfigError
from dsv4core.workspace import CHUNK, chunk_size

SCORES_A_WARP = 512
"""16 a thread; programs have 4 to 16 warps."""
GUESSES = 12
"""Counts at interpolated scores, before the search halves."""


def index_topk(logits: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """As the definition.

    Raises:
        ConfigError: `k` is more than half of what a program looks at.
    """
    if 2 * k > CHUNK:
        raise ConfigError(f"index_topk={k} is more than this kernel chooses; the most is {CHUNK // 2}.")
    tokens, width = logits.shape
    numbers, level, size = None, 0, chunk_size(k)
    while width > size:
        chunks = triton.cdiv(width, size)
        best = torch.empty(tokens, chunks * k, dtype=torch.float32, device=logits.device)
        names = torch.empty(tokens, chunks * k, dtype=torch.int32, device=logits.device)
        _launch(logits, numbers, visible, best, names, k, size, level)
        logits, numbers, width, level = best, names, chunks * k, level + 1
    selected = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    _launch(logits, numbers, visible, None, selected, k, size, level)
    return selected


def _launch(
    values: torch.Tensor,
    numbers: torch.Tensor | None,
    visible: torch.Tensor,
    best: torch.Tensor | None,
    names: torch.Tensor,
    k: int,
    chunk: int,
    level: int,
) -> None:
    """Keep the `k` best of each chunk. A grid's first axis may be long, its second is short."""
    if values.shape[0] == 0:
        return
    rows, width = values.shape
    size = min(max(triton.next_power_of_2(width), 128), chunk)
    _keep_best[(rows, triton.cdiv(width, chunk))](
        values,
        numbers,
        visible,
        best,
        names,
        width,
        values.stride(0),
        names.stride(0),
        k,
        CHUNK=chunk,
        SIZE=size,
        MOST=triton.next_power_of_2(k),
        LEVEL=level,
        GUESSES=GUESSES,
        num_warps=min(max(size // SCORES_A_WARP, 4), 16),
    )


@triton.jit
def _keep_best(
    values,
    numbers,
    visible,
    best,
    names,
    width,
    value_stride,
    name_stride,
    k,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    LEVEL: tl.constexpr,
    GUESSES: tl.constexpr,
):
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(visible + row).to(tl.int32)
    for _ in tl.static_range(LEVEL):
        length = tl.cdiv(length, CHUNK) * k
    length = tl.minimum(length, width)
    first = number * CHUNK
    if (first >= length) & (number > 0):  # the next level does not look there
        return
    place = first + tl.arange(0, SIZE)
    here = place < length
    # Scores behind the last one may be anything, and are loaded so that 16 bytes are loaded at once.
    score = tl.load(
        values + row * value_stride + place, mask=place < tl.minimum(tl.cdiv(length, 16) * 16, width)
    )
    score = tl.where(here, score, float("-inf"))
    key = _ordered(score)
    threshold = _threshold(key, k, GUESSES)
    above = (key > threshold).to(tl.int32)
    equal = ((key == threshold) & (key != 0)).to(tl.int32)
    # Neither count exceeds 16 bits: both come from one scan.
    before = tl.cumsum(above | (equal << 16), axis=0)
    room = k - tl.sum(above)
    above_before, equal_before = before & 0xFFFF, before >> 16
    chosen = (above != 0) | ((equal != 0) & (equal_before <= room))
    target = row * name_stride + number * k
    position = above_before + tl.minimum(equal_before, room) - 1
    name = place if numbers is None else tl.load(numbers + row * value_stride + place, mask=here, other=-1)
    tl.store(names + target + position, name, mask=chosen)
    rest = tl.arange(0, MOST)
    unused = (rest >= tl.sum(chosen.to(tl.int32))) & (rest < k)
    tl.store(names + target + rest, -1, mask=unused)
    if best is not None:
        tl.store(best + target + position, _score_of(key), mask=chosen)
        tl.store(best + target + rest, float("-inf"), mask=unused)


@triton.jit
def _threshold(key, k, GUESSES: tl.constexpr):
    """The `k`-th largest key, or one below it with no other key between; 0 if there are no more than `k`.

    Tails of scores fall like exponentials, so the logarithm of the count is interpolated, and an end that
    stays is drawn nearer (the Illinois rule), which takes fewer counts than halving. It halves in the end,
    so that 32 more are enough for any.
    """
    count = tl.sum((key != 0).to(tl.int32))
    # At least k keys reach `low`, and fewer `high`.
    low, high = tl.min(key - 1) + 1, tl.max(key) + 1  # the least of those that are not 0
    wanted = tl.log2(k + 0.5)
    over, under = tl.log2(tl.maximum(count, 1).to(tl.float32)) - wanted, wanted + 1.0
    if count <= k:
        low = low * 0
    step, side = 0, 0
    while (count > k) & (high - low > 1):
        left, right = _score_of(low), _score_of(high)
        guess = _ordered(left + over / (over + under) * (right - left))
        guess = tl.where(step < GUESSES, guess, low + ((high - low) >> 1))
        guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        found = tl.sum((key >= guess).to(tl.int32))
        gap = tl.log2(tl.maximum(found.to(tl.float32), 0.5)) - wanted
        if found >= k:
            low, count, over = guess, found, gap
            under = tl.where(side == 1, under * 0.5, under)
            side = 1
        else:
            high, under = guess, -gap
            over = tl.where(side == -1, over * 0.5, over)
            side = -1
        step += 1
    return low


@triton.jit
def _ordered(score):
    """Scores as integers of the same order; 0 for NaN and minus infinity, which are never chosen."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # both zeros are equal
    flipped = tl.where(bits < 0, ~bits, bits ^ -0x80000000)
    return tl.where(score > float("-inf"), flipped, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _score_of(key):
    """The score that has a key."""
    positive = key.to(tl.int32, bitcast=True) < 0
    return tl.where(positive, key ^ 0x80000000, ~key).to(tl.uint32).to(tl.float32, bitcast=True)
