"""`Machine`: what `shoal calibrate` measured of the processors it ran on, as curves that can be read at any size.

A product of matrices takes a start and its arithmetic at a rate that small sides lessen; whatever passes over memory
is read off a curve between the sizes that were timed; so are collectives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """Products of (rows x inner) by (inner x columns)."""

    start_s: float
    flops: float
    """A second, of a large one."""
    rows: float
    """A side this long doubles the time that the arithmetic takes."""
    columns: float
    inner: float

    def seconds(self, count: float, rows: float, columns: float, inner: float) -> float:
        """`count` of them in one call."""
        sides = (1 + self.rows / rows) * (1 + self.columns / columns) * (1 + self.inner / inner)
        return self.start_s + 2 * count * rows * columns * inner / self.flops * sides


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds at some sizes, straight between them in logarithms; beyond them proportional, or constant below."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        if size >= sizes[-1]:
            return seconds[-1] * size / sizes[-1]
        above = bisect_right(sizes, size)
        low, high = sizes[above - 1], sizes[above]
        part = log(size / low) / log(high / low)
        return exp((1 - part) * log(seconds[above - 1]) + part * log(seconds[above]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One host, all of whose ranks compute at the same time."""

    ranks: int
    """That were measured together."""
    memory_bytes: float
    memory_bytes_per_s: float
    """Of one rank, reading and writing, while the others do the same."""
    products: Mapping[str, tuple[Product, Product]]
    """linear, convolution, attention: forward, and both gradients together."""
    passes: Mapping[str, tuple[Curve, Curve]]
    """By kind of operator, over elements: forward, and all gradients together."""
    updates: Mapping[str, Curve]
    """By optimiser, over parameters."""
    collectives: Mapping[str, Curve]
    """By kind, over bytes."""
    background_byte_s: float
    """The core's time for each byte that goes between hosts while a rank computes."""
    overheads: Mapping[str, float]
    """Seconds that the engine adds: once a step, for each micro-batch, ..."""
    codecs: Mapping[str, tuple[float, float]]
    """Compressors: seconds a tensor, seconds an element."""
