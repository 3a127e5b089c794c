"""Around a ring: each rank talks to its two neighbours only, and every link carries the same.

    P-1 steps    each rank passes a part on; what it gets is reduced into its own part of the same place
    P-1 steps    the finished parts go once more around

2(P-1) messages of n/P bytes from each rank: the fewest bytes there can be, and the most messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.comm.collectives.algorithms import AllReduce
from shoal.comm.wire import Sent

if TYPE_CHECKING:
    from shoal.comm.network import LinkTimes
    from shoal.comm.peers import Peers, Steps
    from shoal.comm.vector import Operation, Vector


class ring(AllReduce):
    """Reduce-scatter and all-gather, both around the ring."""

    words = "around a ring"

    def steps(self, peers: Peers, x: Vector, operation: Operation) -> Steps:
        parts = x.parts(peers.size)
        yield from ring_reduce_scatter(peers, parts, operation)
        yield from ring_all_gather(peers, parts)

    def sent(self, nbytes: int, ranks: int, hosts: tuple[int, ...] = ()) -> Sent:
        return Sent(2 * (ranks - 1), 2 * nbytes * (ranks - 1) // ranks)

    def link_seconds(self, nbytes: int, ranks: int, link: LinkTimes) -> float:
        share = nbytes * (ranks - 1) / ranks
        return 2 * (ranks - 1) * link.latency_s + share * (2 * link.byte_s + link.reduce_byte_s)


def ring_reduce_scatter(peers: Peers, parts: Sequence[Vector], operation: Operation) -> Steps:
    """In place: afterwards the part with this rank's number is reduced, the others hold sums under way."""
    size, rank = peers.size, peers.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(1, size):
        going, coming = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        yield from peers.finish(peers.send(right, going), peers.receive(left, coming, operation))


def ring_all_gather(peers: Peers, parts: Sequence[Vector]) -> Steps:
    """The part with this rank's number goes to all others."""
    size, rank = peers.size, peers.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        going, coming = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        yield from peers.finish(peers.send(right, going), peers.receive(left, coming))
