"""Which ranks are workers and which are servers, and which part of the model each server has.

The level with servers is the outermost axis: replica i is the ranks from i * Q on, Q of them, and the rank at position
q of each replica holds the same slices. Each position's slices are cut into as many parts as there are shards, equal to
a cache line; part j of position q is at server (j, q):

    colocated    the rank at position q of replica j, which serves in a thread
    dedicated    rank workers + stage * shards + j: every stage of a pipeline has servers of its own

The first server is the coordinator of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.strategy.expression import Strategy
from shoal.strategy.terms import dp, pp, ps

HEADER_NUMBERS = 16
"""Numbers at the beginning of a message to a server; four for each replica and one for each parameter follow."""
LINE = 16
"""Elements: no shard begins in the middle of a cache line."""


class Part(NamedTuple):
    """Elements [start, stop) of the master of one bucket."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True)
class Seats:
    """The ranks of a level with servers."""

    axis: str
    replicas: int
    positions: int
    shards: int
    colocated: bool
    stages: tuple[int, ...]
    """The pipeline stage of each position."""

    @property
    def workers(self) -> int:
        return self.replicas * self.positions

    def worker(self, replica: int, position: int) -> int:
        return replica * self.positions + position

    def server(self, shard: int, position: int) -> int:
        """The rank of a position's server."""
        if self.colocated:
            return self.worker(shard, position)
        return self.workers + self.stages[position] * self.shards + shard

    @property
    def servers(self) -> list[int]:
        """All ranks that serve, the coordinator first."""
        found = [self.server(shard, position) for shard in range(self.shards) for position in range(self.positions)]
        return list(dict.fromkeys(found))

    def served_by(self, rank: int) -> list[tuple[int, int]]:
        """(shard, position) of all parts at a server."""
        return [
            (shard, position)
            for shard in range(self.shards)
            for position in range(self.positions)
            if self.server(shard, position) == rank
        ]


def seats_of(strategy: Strategy) -> Seats | None:
    """The ranks of the level with servers; None where there is none."""
    found = [axis for axis in strategy.axes if isinstance(axis.term, dp) and isinstance(axis.term.via, ps)]
    if not found:
        return None
    axis, via = found[0], found[0].term.via  # type: ignore[attr-defined]
    positions = strategy.workers // axis.size
    inner = 1  # Ranks between two neighbours along pp.
    stages = [0] * positions
    for other in reversed(strategy.axes[1:]):
        if isinstance(other.term, pp):
            stages = [position // inner % other.size for position in range(positions)]
        inner *= other.size
    return Seats(axis.name, axis.size, positions, via.shards, via.colocated, tuple(stages))


def parts_of(
    slices: Sequence[tuple[int, int]], shards: int, *, starts: Sequence[Sequence[int]] | None = None
) -> list[list[Part]]:
    """A position's slices, as (elements, bytes of an element), cut into shards of equal bytes. `starts`: where
    parameters begin in each slice, if none may be cut."""
    total = sum(elements * itemsize for elements, itemsize in slices)
    found: list[list[Part]] = []
    for shard in range(shards):
        low, high = (total * at // shards for at in (shard, shard + 1))
        mine, begin = [], 0
        for bucket, (elements, itemsize) in enumerate(slices):
            end = begin + elements * itemsize
            start, stop = (
                elements if at >= end else max(0, at - begin) // (LINE * itemsize) * LINE for at in (low, high)
            )
            if starts is not None:
                start, stop = (_at_a_parameter(at, starts[bucket], elements) for at in (start, stop))
            if start < stop:
                mine.append(Part(bucket, start, stop))
            begin = end
        found.append(mine)
    return found


def _at_a_parameter(at: int, starts: Sequence[int], elements: int) -> int:
    """The nearest place at which no parameter is cut."""
    return min((0, *starts, elements), key=lambda place: abs(place - at))
