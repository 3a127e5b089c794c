"""Operators whose depth is that of a sum: norms, pooling, softmax, losses, plain sums."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from shoal.analysis.operator import Cost, Operator, log2_ceil, moved_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooling(Operator):
    """The largest or the mean of a window, for each channel."""

    kind: ClassVar[str] = "pooling"

    samples: int
    channels: int
    image: tuple[int, ...]
    output: tuple[int, ...]
    kernel: tuple[int, ...]

    @property
    def shape(self) -> str:
        sides = " x ".join(str(side) for side in self.kernel)
        return f"{sides} on {self.samples:,} x {self.channels:,} x {' x '.join(str(side) for side in self.image)}"

    @property
    def numbers(self) -> int:
        return self.samples * self.channels * prod(self.image)

    def forward(self) -> Cost:
        read, written = self.numbers, self.samples * self.channels * prod(self.output)
        # A window reaches beyond the image only into padding, which is not read.
        depth = sum(log2_ceil(min(window, side)) for window, side in zip(self.kernel, self.image, strict=True))
        return Cost(read, depth, moved_bytes(read, written))

    def input_gradient(self) -> Cost:
        return self.forward()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchNorm(Operator):
    """Each channel is normalised by the mean and variance of all its numbers: over samples, and over the image where
    there is one.
    """

    kind: ClassVar[str] = "batch norm"

    samples: int
    channels: int
    image: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        return 2 * self.channels

    @property
    def shape(self) -> str:
        return " x ".join(f"{size:,}" for size in (self.samples, self.channels, *self.image))

    @property
    def _elements(self) -> int:
        return self.samples * self.channels * prod(self.image)

    @property
    def _depth(self) -> int:
        return log2_ceil(self.samples) + sum(log2_ceil(side) for side in self.image)

    def forward(self) -> Cost:
        return Cost(self._elements, self._depth, moved_bytes(2 * self._elements, 2 * self.channels))

    def input_gradient(self) -> Cost:
        return Cost(self._elements, self._depth, moved_bytes(3 * self._elements, self.channels))

    def weight_gradient(self) -> Cost:
        return Cost(self._elements, self._depth, moved_bytes(2 * self._elements, 2 * self.channels))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows(Operator):
    """Rows of numbers, each with sums of its own."""

    rows: int
    width: int

    @property
    def shape(self) -> str:
        return f"{self.rows:,} x {self.width:,}"

    @property
    def elements(self) -> int:
        return self.rows * self.width

    @property
    def numbers(self) -> float:
        return self.elements


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNorm(_Rows):
    """Each row is normalised by its own mean and variance, or by its root mean square (then without a bias)."""

    kind: ClassVar[str] = "layer norm"

    bias: bool = True
    affine: bool = True
    """Whether it has weights at all."""

    @property
    def parameters(self) -> int:
        return self.width * (1 + self.bias) if self.affine else 0

    def forward(self) -> Cost:
        return Cost(self.elements, log2_ceil(self.width), moved_bytes(2 * self.elements, self.parameters))

    def input_gradient(self) -> Cost:
        return Cost(self.elements, log2_ceil(self.width), moved_bytes(3 * self.elements, self.parameters))

    def weight_gradient(self) -> Cost:
        if not self.affine:
            return Cost()
        return Cost(self.elements, log2_ceil(self.rows), moved_bytes(2 * self.elements, self.parameters))


@dataclass(frozen=True, kw_only=True, slots=True)
class Softmax(_Rows):
    """Two sums over each row: its largest number, and the total of the exponentials."""

    kind: ClassVar[str] = "softmax"

    def forward(self) -> Cost:
        return Cost(2 * self.elements, 2 * log2_ceil(self.width), moved_bytes(2 * self.elements))

    def input_gradient(self) -> Cost:
        return Cost(2 * self.elements, log2_ceil(self.width) + 1, moved_bytes(3 * self.elements))


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss(_Rows):
    """Cross-entropy over `width` classes: a softmax of each row, and the sum over rows. Its gradient is probabilities
    minus targets."""

    kind: ClassVar[str] = "loss"

    def forward(self) -> Cost:
        depth = 2 * log2_ceil(self.width) + log2_ceil(self.rows)
        return Cost(2 * self.elements + self.rows, depth, moved_bytes(self.elements, self.rows))

    def input_gradient(self) -> Cost:
        return Cost(self.elements, 1, moved_bytes(2 * self.elements, self.rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction(Operator):
    """A sum, mean or maximum of many numbers into fewer."""

    kind: ClassVar[str] = "reduction"

    function: str
    elements: int
    outputs: int

    @property
    def shape(self) -> str:
        return f"{self.function} of {self.elements:,} into {self.outputs:,}"

    @property
    def numbers(self) -> float:
        return self.elements

    def forward(self) -> Cost:
        depth = log2_ceil(-(-self.elements // self.outputs))
        return Cost(self.elements, depth, moved_bytes(self.elements, self.outputs))

    def input_gradient(self) -> Cost:
        return Cost(self.elements, 1, moved_bytes(self.elements, self.outputs))
