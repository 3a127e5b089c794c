"""Embeddings, and operators of which only the shapes are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.analysis.operator import NOTHING, Cost, Operator, log2_ceil, moved_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding(Operator):
    """Rows of a table by number. Backward adds up the gradients of a row that was asked for more than once, at worst
    of one row only.
    """

    kind: ClassVar[str] = "embedding"

    lookups: int
    table: int
    width: int

    @property
    def parameters(self) -> int:
        return self.table * self.width

    @property
    def shape(self) -> str:
        return f"{self.lookups:,} of {self.table:,} x {self.width:,}"

    @property
    def numbers(self) -> int:
        return self.lookups * self.width

    def forward(self) -> Cost:
        return Cost(self.numbers, 1, moved_bytes(self.lookups, 2 * self.numbers))

    def input_gradient(self) -> Cost:
        return NOTHING

    def weight_gradient(self) -> Cost:
        return Cost(self.numbers, log2_ceil(self.lookups), moved_bytes(self.lookups, 2 * self.numbers))


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown(Operator):
    """An operator without a formula of its own, counted by its shapes: one operation for each number that it reads or
    writes, whichever are more, and the depth of a sum of the one into the other. A lower bound.
    """

    kind: ClassVar[str] = "unknown"

    name: str
    read: int
    written: int
    weights: int = 0

    @property
    def parameters(self) -> int:
        return self.weights

    @property
    def shape(self) -> str:
        return f"{self.name}: {self.read:,} to {self.written:,}"

    def forward(self) -> Cost:
        work = max(self.read, self.written, 1)
        depth = max(log2_ceil(max(1, -(-self.read // max(self.written, 1)))), 1)
        return Cost(work, depth, moved_bytes(self.read, self.written))

    def input_gradient(self) -> Cost:
        return self.forward()

    def weight_gradient(self) -> Cost:
        return self.forward() if self.weights else NOTHING
