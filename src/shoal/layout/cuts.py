"""How one tensor is cut among the ranks of an axis: along one dimension, segment by segment.

A fused projection (query, key and value in one matrix) is cut within each of its segments, so that every rank gets
its heads of all three. A plain one has a single segment. Parts may be uneven (a vocabulary of 50,257): the first
ranks then hold one more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.common.numbers import even_part

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Cut:
    """`segments` are the sizes, along `dim`, of the stretches that are each dealt out."""

    dim: int
    segments: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.segments)

    def intervals(self, ranks: int, index: int) -> tuple[tuple[int, int], ...]:
        """What a rank holds, as ranges of the whole dimension; laid end to end they are its part."""
        found, start = [], 0
        for segment in self.segments:
            low, high = even_part(segment, ranks, index)
            found.append((start + low, start + high))
            start += segment
        return tuple(found)

    def local_size(self, ranks: int, index: int) -> int:
        return sum(stop - start for start, stop in self.intervals(ranks, index))

    def part(self, whole: torch.Tensor, ranks: int, index: int) -> torch.Tensor:
        """A rank's part of a whole tensor: a view where it is one stretch, a copy otherwise."""
        import torch

        pieces = [whole.narrow(self.dim, a, b - a) for a, b in self.intervals(ranks, index)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def fill(self, whole: torch.Tensor, part: torch.Tensor, ranks: int, index: int) -> None:
        """Writes a rank's part into its places of the whole."""
        at = 0
        for start, stop in self.intervals(ranks, index):
            whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, at, stop - start))
            at += stop - start

    def to_json(self) -> dict[str, Any]:
        return {"dim": self.dim, "segments": list(self.segments)}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Cut:
        return Cut(row["dim"], tuple(row["segments"]))


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a tensor that is cut."""

    cut: Cut
    ranks: int
    index: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return self.cut.part(whole, self.ranks, self.index)

    def fill(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        self.cut.fill(whole, part, self.ranks, self.index)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The whole tensor's shape, from the part's."""
        return (*shape[: self.cut.dim], self.cut.size, *shape[self.cut.dim + 1 :])

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape, from the whole tensor's."""
        local = self.cut.local_size(self.ranks, self.index)
        return (*shape[: self.cut.dim], local, *shape[self.cut.dim + 1 :])

    def to_json(self) -> dict[str, Any]:
        return {"cut": self.cut.to_json(), "ranks": self.ranks, "index": self.index}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Part:
        return Part(Cut.from_json(row["cut"]), int(row["ranks"]), int(row["index"]))
