"""Counts that codecs and the formulas of what they send share. Plain numbers: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

INDEX_BYTES = 4
LARGEST_INDEX = 2**31 - 1
BLOCK = 512
"""Elements that share a scale, where a method has no reason for another number."""
TRITS_A_BYTE = 5


def divided_up(total: int, part: int) -> int:
    """Parts needed for the total, the last of which may be short."""
    return -(-total // part)


def kept_count(fraction: float, num_elements: int) -> int:
    """How many elements a fraction is: at least one."""
    return max(1, min(num_elements, round(fraction * num_elements)))


def sparse_bytes(count: int, itemsize: int) -> int:
    """Elements with their places."""
    return count * (INDEX_BYTES + itemsize)


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor taken as a matrix: its first dimension, and all others."""
    rows = shape[0] if len(shape) else 1
    return rows, prod(shape[1:])
