"""Operators that treat each number for itself, or only move numbers: activations, residual additions, concatenation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from shoal.analysis.operator import Cost, Operator, log2_ceil, moved_bytes


class PerNumber(NamedTuple):
    """What a pass costs for each number."""

    work: int
    depth: int
    """Of the full pass: numbers do not wait for each other."""
    moved: int
    """Numbers read and written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elementwise(Operator):
    """An operator whose every number costs the same."""

    each: ClassVar[PerNumber] = PerNumber(work=1, depth=1, moved=3)
    back: ClassVar[PerNumber] = PerNumber(work=1, depth=1, moved=3)

    elements: int

    @property
    def shape(self) -> str:
        return f"{self.elements:,}"

    @property
    def numbers(self) -> float:
        return self.elements

    def _cost(self, one: PerNumber) -> Cost:
        return Cost(one.work * self.elements, one.depth, moved_bytes(one.moved * self.elements))

    def forward(self) -> Cost:
        return self._cost(self.each)

    def input_gradient(self) -> Cost:
        return self._cost(self.back)


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation(Elementwise):
    """A function of one tensor, number by number: ReLU, GELU, SiLU, a mask, a scale."""

    kind: ClassVar[str] = "activation"
    each: ClassVar[PerNumber] = PerNumber(work=1, depth=1, moved=2)

    function: str

    @property
    def shape(self) -> str:
        return f"{self.function} of {self.elements:,}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Add(Elementwise):
    """A residual addition. Its gradient goes to both sides as it is; the sum where the branches forked has a cost."""

    kind: ClassVar[str] = "add"


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiply(Elementwise):
    """Two tensors multiplied number by number, as in gates."""

    kind: ClassVar[str] = "multiply"
    back: ClassVar[PerNumber] = PerNumber(work=2, depth=1, moved=5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary(Elementwise):
    """Rotary positions: pairs of numbers are turned by an angle, which is two multiply-adds for each number."""

    kind: ClassVar[str] = "rotary"
    each: ClassVar[PerNumber] = PerNumber(work=2, depth=2, moved=2)
    back: ClassVar[PerNumber] = each


@dataclass(frozen=True, kw_only=True, slots=True)
class Concatenation(Elementwise):
    """Moves numbers and computes nothing; copies count as one."""

    kind: ClassVar[str] = "copy"
    each: ClassVar[PerNumber] = PerNumber(work=0, depth=0, moved=2)
    back: ClassVar[PerNumber] = each


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

    @property
    def numbers(self) -> float:
        return self.elements

    def forward(self) -> Cost:
        return Cost(self.elements, 1, moved_bytes(2 * self.elements, self.weights))

    def input_gradient(self) -> Cost:
        return Cost(self.elements, 1, moved_bytes(2 * self.elements, self.weights))

    def weight_gradient(self) -> Cost:
        depth = log2_ceil(max(1, -(-self.elements // self.weights)))
        return Cost(self.elements, depth, moved_bytes(2 * self.elements, self.weights))
