"""Small arithmetic that several rooms need: parts of a range, balanced shares, divisors, bytes, zeros of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence


def even_part(total: int, parts: int, index: int) -> tuple[int, int]:
    """(start, stop) of one of the parts of [0, total): sizes differ by at most one, the larger parts come first."""
    size, larger = divmod(total, parts)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


def divisors(total: int) -> list[int]:
    """All divisors, ascending."""
    small = [number for number in range(1, int(total**0.5) + 1) if total % number == 0]
    large = [total // number for number in reversed(small)]
    return small + large[1 if small and small[-1] == large[0] else 0 :]


def ordered_products(total: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered product."""
    if factors == 1:
        yield (total,)
        return
    for first in divisors(total):
        for rest in ordered_products(total // first, factors - 1):
            yield (first, *rest)


def falls_to_zero(
    value: Callable[[float], float], low: float, high: float, *, above: float, below: float, close: float
) -> float:
    """Just before (up to `close`) a function falls from `above` 0 at `low` to `below` 0 at `high`: false position with
    halved ends (Dowell & Jarratt 1971)."""
    while high - low > close:
        middle = low + (high - low) * above / (above - below)
        middle = min(max(middle, low + close / 2), high - close / 2)
        here = value(middle)
        if here > 0:
            low, above, below = middle, here, below / 2
        else:
            high, below, above = middle, here, above / 2
    return low


def balanced(sizes: Sequence[int], parts: int) -> list[int]:
    """For each size the part that it goes to: the largest first, each to the part that has least so far (Graham 1969,
    at most 4/3 of the best). Equal sizes go in their order."""
    loads, found = [0] * parts, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        found[place] = loads.index(min(loads))
        loads[found[place]] += sizes[place]
    return found


ALIGNED = 16
"""Every tensor of a packed message begins at a multiple of as many bytes."""


def packed_bytes(sizes: Sequence[int], *, numbers: int = 0) -> int:
    """Bytes of one message of some float64 numbers and of tensors with these sizes in bytes (`comm/pairs.py`)."""
    return sum(-(-size // ALIGNED) * ALIGNED for size in (8 * numbers, *sizes))
