"""Operators that treat each number for itself, or only move numbers: activations, residual additions, concatenation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.analysis.operator import Cost, Operator, log2_ceil, moved_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation(Operator):
    """A function of one tensor, number by number: ReLU, GELU, SiLU, a mask, a scale."""

    kind: ClassVar[str] = "activation"

    function: str
    elements: int

    @property
    def shape(self) -> str:
        return f"{self.function} of {self.elements:,}"

    def forward(self) -> Cost:
        return Cost(self.elements, 1, moved_bytes(2 * self.elements))

    def input_gradient(self) -> Cost:
        return Cost(self.elements, 1, moved_bytes(3 * self.elements))


@dataclass(frozen=True, kw_only=True, slots=True)
class Add(Operator):
    """A residual addition. Its gradient goes to both sides as it is; the sum where the branches forked has a cost."""

    kind: ClassVar[str] = "add"

    elements: int

    @property
    def shape(self) -> str:
        return f"{self.elements:,}"

    def forward(self) -> Cost:
        return Cost(self.elements, 1, moved_bytes(3 * self.elements))

    def input_gradient(self) -> Cost:
        return Cost(self.elements, 1, moved_bytes(3 * self.elements))


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiply(Operator):
    """Two tensors multiplied number by number, as in gates."""

    kind: ClassVar[str] = "multiply"

    elements: int

    @property
    def shape(self) -> str:
        return f"{self.elements:,}"

    def forward(self) -> Cost:
        return Cost(self.elements, 1, moved_bytes(3 * self.elements))

    def input_gradient(self) -> Cost:
        return Cost(2 * self.elements, 1, moved_bytes(5 * self.elements))


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned(Operator):
    """A tensor combined number by number with learned numbers: a bias, a gain, a table of positions."""

    kind: ClassVar[str] = "learned numbers"

    function: str
    elements: int
    weights: int

    @property
    def parameters(self) -> int:
        return self.weights

    @property
    def shape(self) -> str:
        return f"{self.function} of {self.elements:,} and {self.weights:,} weights"

    def forward(self) -> Cost:
        return Cost(self.elements, 1, moved_bytes(2 * self.elements, self.weights))

    def input_gradient(self) -> Cost:
        return Cost(self.elements, 1, moved_bytes(2 * self.elements, self.weights))

    def weight_gradient(self) -> Cost:
        depth = log2_ceil(max(1, -(-self.elements // self.weights)))
        return Cost(self.elements, depth, moved_bytes(2 * self.elements, self.weights))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary(Operator):
    """Rotary positions: pairs of numbers are turned by an angle, which is two multiply-adds for each number."""

    kind: ClassVar[str] = "rotary"

    elements: int

    @property
    def shape(self) -> str:
        return f"{self.elements:,}"

    def forward(self) -> Cost:
        return Cost(2 * self.elements, 2, moved_bytes(2 * self.elements))

    def input_gradient(self) -> Cost:
        return self.forward()


@dataclass(frozen=True, kw_only=True, slots=True)
class Concatenation(Operator):
    """Moves numbers and computes nothing; copies count as one."""

    kind: ClassVar[str] = "copy"

    elements: int

    @property
    def shape(self) -> str:
        return f"{self.elements:,}"

    def forward(self) -> Cost:
        return Cost(0, 0, moved_bytes(2 * self.elements))

    def input_gradient(self) -> Cost:
        return self.forward()
