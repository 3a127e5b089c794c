"""Messages between islands that are neighbours in a graph: models, and the few numbers that travel with them.

A stop that one island was asked for travels with the models: the island computes after which round all will know
(`known_to_all`), and all stop after that round. A neighbour that was killed is left out: what it would have sent is
missing from what arrives, and nothing is sent to it any more. The others learn of it when all islands meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from shoal.comm.transport.link import PeerLost

if TYPE_CHECKING:
    from shoal.parallel.sync.outer import OuterLevel

NEVER = 0.0
"""As a round to stop after; rounds are sent counted from 1."""


class Arrived(NamedTuple):
    """What a neighbour sent."""

    source: int
    tensors: list[torch.Tensor]
    number: float


class NeighbourMessages:
    """What one rank exchanges with the same rank of neighbouring islands."""

    def __init__(self, level: OuterLevel) -> None:
        self._level = level
        self.lost: set[int] = set()
        """Islands that were lost since all met."""
        self._stop_after = NEVER

    def exchange(
        self, to: Sequence[int], sources: Sequence[int], tensors: Sequence[torch.Tensor], number: float = 1.0
    ) -> list[Arrived]:
        """Sends tensors and a number to some islands and receives the like from others, in the order of `sources`;
        all are under way at once. Tensors must not change until it returns."""
        islands = self._level.islands
        numbers = torch.tensor([self._stop_after, number], dtype=torch.float64, device=self._level.device)
        receiving, sending = [], []
        for source in (source for source in sources if source not in self.lost):
            into = [torch.empty_like(tensor) for tensor in (*tensors, numbers)]
            works = [
                dist.irecv(tensor, src=islands.ranks[source], group=islands.group, tag=tag)
                for tag, tensor in enumerate(into)
            ]
            receiving.append((source, into, works))
        for target in (target for target in to if target not in self.lost):
            works = [
                dist.isend(tensor, dst=islands.ranks[target], group=islands.group, tag=tag)
                for tag, tensor in enumerate((*tensors, numbers))
            ]
            sending.append((target, works))
        arrived = []
        for source, into, works in receiving:
            if self._done(source, works):
                after, theirs = into.pop().tolist()
                arrived.append(Arrived(source, into, theirs))
                if after != NEVER:
                    self.stop_after(int(after) - 1)
        for target, works in sending:
            self._done(target, works)
        return arrived

    def _done(self, island: int, works: Sequence[object]) -> bool:
        """Waits for messages from or to an island; False where it was lost meanwhile and the run may go on."""
        try:
            for work in works:
                work.wait()  # type: ignore[attr-defined]
        except PeerLost:
            if self._level.losses is None:
                raise
            self.lost.add(island)
            return False
        return True

    def stop_after(self, round: int) -> None:
        """All islands stop after the earliest round that one of them names."""
        self._stop_after = round + 1.0 if self._stop_after == NEVER else min(self._stop_after, round + 1.0)

    def stops(self, round: int) -> bool:
        return self._stop_after != NEVER and round + 1 >= self._stop_after
