"""How a plane lies on a grid of ranks: who owns which rows and columns, and what each needs of the others.

Ownership follows from a size alone: a dimension of any length is split evenly among the ranks along it, the first ones
hold one more. So two tensors of the same size always lie alike, whatever strides and paddings led to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from shoal.common.numbers import even_part
from shoal.layout.cuts import Cut

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]
"""For each place along an axis."""
Box = tuple[Interval, Interval]
"""Along the two axes."""


@dataclass(frozen=True, slots=True)
class AxisCut:
    """A dimension of a tensor that is (outer, length, inner), of which each rank holds some of `length`."""

    dim: int
    length: int
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        return self.outer * self.length * self.inner

    @property
    def is_plain(self) -> bool:
        return self.outer == self.inner == 1

    def as_cut(self) -> Cut:
        return Cut(self.dim, (self.length * self.inner,) * self.outer)


Part = tuple[AxisCut | None, AxisCut | None]
"""How a tensor is cut along the rows and along the columns of the grid."""
FULL: Part = (None, None)


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks along the height and along the width."""

    sizes: tuple[int, int]

    @property
    def ranks(self) -> int:
        return prod(self.sizes)

    def place(self, index: int) -> tuple[int, int]:
        return index // self.sizes[1], index % self.sizes[1]

    def splits(self, axis: int, length: int) -> bool:
        """Whether a dimension of this length is split: a shorter one is computed by all ranks alike."""
        return 1 < self.sizes[axis] <= length

    def owned(self, axis: int, length: int) -> Intervals:
        return tuple(even_part(length, self.sizes[axis], at) for at in range(self.sizes[axis]))

    def everything(self, axis: int, length: int) -> Intervals:
        return ((0, length),) * self.sizes[axis]

    def local_shape(self, shape: tuple[int, ...], part: Part, place: tuple[int, int]) -> tuple[int, ...]:
        """The shape of a rank's part of a tensor of this full shape."""
        sizes = list(shape)
        for axis, cut in enumerate(part):
            if cut is not None:
                low, high = even_part(cut.length, self.sizes[axis], place[axis])
                sizes[cut.dim] = sizes[cut.dim] // cut.length * (high - low)
        return tuple(sizes)

    def full_shape(self, shape: tuple[int, ...], part: Part) -> tuple[int, ...]:
        """The shape of the full tensor, from that of a part."""
        sizes = list(shape)
        for cut in part:
            if cut is not None:
                sizes[cut.dim] = cut.size
        return tuple(sizes)


@dataclass(frozen=True, slots=True)
class Need:
    """What each rank along an axis needs of a dimension."""

    cut: AxisCut
    intervals: Intervals
    held: bool
    """Whether each rank holds its part only; else it has all, and takes from that."""

    def have(self, grid: Grid, axis: int) -> Intervals:
        return grid.owned(axis, self.cut.length) if self.held else grid.everything(axis, self.cut.length)


@dataclass(frozen=True, slots=True)
class Move:
    """One operand brought from how it lies to what an operation needs."""

    value: int
    needs: tuple[Need | None, Need | None]
    part: Part = FULL
    """How it lies."""

    def travels(self, grid: Grid) -> bool:
        """Whether any rank needs what another one holds."""
        return any(
            not (have[0] <= low and high <= have[1])
            for axis, need in enumerate(self.needs)
            if need is not None and need.held
            for (low, high), have in zip(need.intervals, need.have(grid, axis), strict=True)
        )

    def messages(self, grid: Grid, index: int) -> Iterator[tuple[int, Box, Box]]:
        """For each other rank that this one exchanges with: (its index, what it gets of this rank's part, what comes
        from it), as intervals along the two axes; empty ones where nothing goes."""
        mine = grid.place(index)
        for other in range(grid.ranks):
            place = grid.place(other)
            apart = [axis for axis in (0, 1) if place[axis] != mine[axis]]
            if not apart or any(self.needs[axis] is None or not self.needs[axis].held for axis in apart):  # type: ignore[union-attr]
                continue
            leaving = self._between(grid, mine, place)
            arriving = self._between(grid, place, mine)
            if size_of(leaving) or size_of(arriving):
                yield other, leaving, arriving

    def _between(self, grid: Grid, owner: tuple[int, int], user: tuple[int, int]) -> Box:
        found = []
        for axis, need in enumerate(self.needs):
            if need is None:
                found.append((0, 1))
            else:
                found.append(overlap(need.have(grid, axis)[owner[axis]], need.intervals[user[axis]]))
        return found[0], found[1]

    def bytes(self, grid: Grid, index: int, shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
        """(sent, received) with each rank that this one exchanges with; `shape` is that of the full tensor along the
        needed dimensions, and this rank's own along others."""
        rest = prod(shape)
        for need in self.needs:
            rest = rest // need.cut.length if need is not None else rest
        for _, leaving, arriving in self.messages(grid, index):
            yield size_of(leaving) * rest * itemsize, size_of(arriving) * rest * itemsize


def overlap(a: Interval, b: Interval) -> Interval:
    low = max(a[0], b[0])
    return low, max(low, min(a[1], b[1]))


def size_of(box: Box) -> int:
    return prod(high - low for low, high in box)


def clipped(span: Interval, length: int) -> Interval:
    low = min(max(span[0], 0), length)
    return low, max(low, min(span[1], length))


@dataclass(frozen=True, slots=True)
class DimWindow:
    """One dimension of an operation that computes each output interval from an interval of its input."""

    axis: int
    dim: int
    length: int
    """Of the full input."""
    out: Intervals
    """The outputs that each rank computes."""
    span: Intervals
    """The inputs that these read, beyond the edges too."""
    have: Intervals
    """Those that exist."""


def window(
    grid: Grid, axis: int, dim: int, lengths: tuple[int, int], reads: Callable[[Interval], Interval]
) -> tuple[DimWindow, bool]:
    """Ownership by output interval: `lengths` are (input, output), `reads` gives the inputs of an output interval.
    Also whether the output is cut."""
    length, made = lengths
    cut = grid.splits(axis, made)
    out = grid.owned(axis, made) if cut else grid.everything(axis, made)
    span = tuple(reads(each) for each in out)
    return DimWindow(axis, dim, length, out, span, tuple(clipped(each, length) for each in span)), cut
