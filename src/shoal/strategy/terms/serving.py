"""What a rule sees that decides when servers update the model: the gradients that have arrived, and the clocks.

A *ticket* is one share of one global batch. A *push* is the gradient of a ticket. The first server decides the order of
all updates and reads, so that every shard of the model goes through the same versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, order=True, slots=True)
class Push:
    """One gradient that has arrived: a sum over `count` samples or tokens."""

    worker: int
    step: int
    share: int
    version: int
    """Updates in the parameters that it was computed with."""
    number: int = 0
    """How many the worker pushed before."""
    count: float = 1.0
    lr_factor: float = 1.0

    @property
    def row(self) -> list[int]:
        """For logs."""
        return [self.worker, self.step, self.share, self.version, self.number]


@dataclass
class Clocks:
    """Where the servers and the workers are."""

    workers: int
    version: int = 0
    """Updates so far."""
    members: set[int] = field(default_factory=set)
    """Workers that are not lost."""
    clocks: dict[int, int] = field(default_factory=dict)
    """The step that each worker computes next, where every worker has its share of every step."""
    reading: dict[int, int] = field(default_factory=dict)
    """Workers that compute now, and the version that they have read."""

    @property
    def slowest(self) -> int:
        return min((self.clocks[worker] for worker in self.members), default=0)


class Decision(NamedTuple):
    """What the servers do next with the gradients that wait."""

    apply: Sequence[Push] = ()
    """Averaged into one update; none if it is too early."""
    drop: Sequence[Push] = ()
