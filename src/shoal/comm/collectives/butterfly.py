"""Recursive doubling: log2 P exchanges of the whole vector, each with a partner twice as far away.

The fewest messages, so the best for small vectors. Sums are taken in the same tree on every rank, and a + b is b + a
to the bit, so all ranks end with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.comm.collectives.powers import folded, largest_power
from shoal.comm.peers import Peers, Steps
from shoal.comm.vector import Operation, Vector


def butterfly_all_reduce(peers: Peers, x: Vector, operation: Operation) -> Steps:
    def within(number: int, rank_of: Callable[[int], int]) -> Steps:
        distance, powers = 1, largest_power(peers.size)
        while distance < powers:
            partner = rank_of(number ^ distance)
            # The same memory goes out and takes in: what arrives must not overtake what leaves.
            going = peers.send(partner, x, overwritten=True)
            yield from peers.finish(going, peers.receive(partner, x, operation, behind=going))
            distance *= 2

    yield from folded(peers, x, operation, within)
