"""What an operator costs: work (operations), depth (the longest chain of operations, each waiting for the last), bytes.

One operation is a multiply-add in a product and one function of one number elsewhere (Ben-Nun & Hoefler 2019, section
2). A sum of n numbers is a tree: depth ceil(log2 n); what happens to each number on its way into a sum adds no depth.
Bytes are those that must move: every operand read once and every result written once, in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one operator in one pass, or of many of them together."""

    work: int = 0
    depth: int = 0
    bytes: int = 0


NOTHING = Cost()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """A matrix product: `count` of (rows x inner) times (inner x columns). The one count of its work, whoever asks."""

    count: int
    rows: int
    columns: int
    inner: int

    @property
    def work(self) -> int:
        """Multiply-adds."""
        return self.count * self.rows * self.columns * self.inner


def log2_ceil(count: int) -> int:
    """Depth of a sum of `count` numbers: 0 for one, 1 for two, 2 for three or four."""
    if count < 1:
        raise ValueError(f"a sum of {count} numbers has no depth; expected at least one")
    return (count - 1).bit_length()


def moved_bytes(*elements: int) -> int:
    """Bytes of tensors, given the elements of each."""
    return ELEMENT_BYTES * sum(elements)


class Operator(ABC):
    """A kind of operator at one shape. Subclasses are frozen dataclasses: equal shapes are equal operators."""

    __slots__ = ()

    kind: ClassVar[str]

    @property
    def parameters(self) -> int:
        """Learned numbers that belong to it."""
        return 0

    @property
    @abstractmethod
    def shape(self) -> str:
        """Its sizes in a few words."""

    @property
    def sides(self) -> Sides | None:
        """Those of the matrix product that it is; None where it is none."""
        return None

    @property
    def numbers(self) -> float:
        """Of a pass over memory: the larger of what it reads of one tensor and what it writes."""
        return self.forward().bytes / ELEMENT_BYTES / 2

    @abstractmethod
    def forward(self) -> Cost: ...

    @abstractmethod
    def input_gradient(self) -> Cost:
        """From the gradient of the output to that of every input."""

    def weight_gradient(self) -> Cost:
        """From the gradient of the output to that of the parameters."""
        return NOTHING

    @property
    def learns(self) -> bool:
        """Whether it has weights, its own or tied ones."""
        return self.weight_gradient() != NOTHING
