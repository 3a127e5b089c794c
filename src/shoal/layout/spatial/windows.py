"""Which inputs an interval of outputs reads, for every operation that slides or resizes along a plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor

import torch

from shoal.layout.spatial.grid import Interval

CUBIC = -0.75
"""The coefficient of cubic interpolation that PyTorch uses."""


def convolution(*, kernel: int, stride: int, padding: int, dilation: int) -> Callable[[Interval], Interval]:
    def reads(out: Interval) -> Interval:
        first, last = out[0], out[1] - 1
        return first * stride - padding, last * stride - padding + dilation * (kernel - 1) + 1

    return reads


def transposed(*, kernel: int, stride: int, padding: int, dilation: int) -> Callable[[Interval], Interval]:
    """At least the inputs that contribute, and so many that their result covers the outputs."""
    reach = dilation * (kernel - 1)

    def reads(out: Interval) -> Interval:
        first, last = out[0] + padding, out[1] - 1 + padding
        low = min(-((reach - first) // stride), first // stride)
        high = max(last // stride, -((reach - last) // stride))
        return low, high + 1

    return reads


def bins(length: int, made: int) -> tuple[tuple[int, int], ...]:
    """The inputs of each output of adaptive pooling."""
    return tuple((at * length // made, -(-(at + 1) * length // made)) for at in range(made))


def hull(rows: Sequence[Sequence[int]]) -> Callable[[Interval], Interval]:
    """Of the inputs that taps read."""

    def reads(out: Interval) -> Interval:
        read = [row[at] for row in rows for at in range(*out)]
        return min(read), max(read) + 1

    return reads


def nearest(length: int, made: int, scale: float | None, *, exact: bool) -> list[int]:
    """As the library computes it, in float32."""
    if not exact and made in (length, 2 * length):
        return [at * length // made for at in range(made)]
    step = torch.tensor(1 / scale if scale else length / made, dtype=torch.float32)
    at = torch.arange(made, dtype=torch.float32)
    found = torch.floor((at + 0.5) * step if exact else at * step).to(torch.int64)
    return [int(row) for row in found.clamp(max=length - 1)]


def mirrored(length: int, before: int, after: int) -> list[int]:
    """Reflection padding."""
    rows = range(-before, length + after)
    return [-row if row < 0 else 2 * (length - 1) - row if row >= length else row for row in rows]


def repeated(length: int, before: int, after: int) -> list[int]:
    """Replication padding."""
    return [min(max(row, 0), length - 1) for row in range(-before, length + after)]


def linear(length: int, made: int, scale: float | None, *, corners: bool) -> tuple[list[list[int]], list[list[float]]]:
    """Two taps for each output, and their weights."""
    low, high, above, below = [], [], [], []
    for at in _sources(length, made, scale, corners=corners):
        place = max(at, 0.0)
        first = min(floor(place), length - 1)
        part = place - first
        low.append(first)
        high.append(min(first + 1, length - 1))
        above.append(1.0 - part)
        below.append(part)
    return [low, high], [above, below]


def cubic(length: int, made: int, scale: float | None, *, corners: bool) -> tuple[list[list[int]], list[list[float]]]:
    """Four taps for each output, and their weights (Keys 1981)."""
    rows: list[list[int]] = [[], [], [], []]
    weights: list[list[float]] = [[], [], [], []]
    for at in _sources(length, made, scale, corners=corners):
        first = floor(at)
        part = at - first
        for tap, weight in enumerate((_outer(part + 1), _inner(part), _inner(1 - part), _outer(2 - part))):
            rows[tap].append(min(max(first - 1 + tap, 0), length - 1))
            weights[tap].append(weight)
    return rows, weights


def _sources(length: int, made: int, scale: float | None, *, corners: bool) -> list[float]:
    if corners:
        step = (length - 1) / (made - 1) if made > 1 else 0.0
        return [at * step for at in range(made)]
    step = 1 / scale if scale else length / made
    return [(at + 0.5) * step - 0.5 for at in range(made)]


def _inner(x: float) -> float:
    return ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1


def _outer(x: float) -> float:
    return ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC
