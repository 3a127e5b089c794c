"""Recursive doubling: log2 P exchanges of the whole vector, each with a partner twice as far away.

The fewest messages, so the best for small vectors. Sums are taken in the same tree on every rank, and a + b is b + a
to the bit, so all ranks end with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING

from shoal.comm.collectives.algorithms import AllReduce
from shoal.comm.collectives.powers import folded, largest_power
from shoal.comm.wire import Sent

if TYPE_CHECKING:
    from shoal.comm.network import LinkTimes
    from shoal.comm.peers import Peers, Steps
    from shoal.comm.vector import Operation, Vector

ONE_MEMORY = 1.5
"""A butterfly sends and takes in the same memory: what arrives has to wait until what it replaces has left."""


class butterfly(AllReduce):
    """Exchanges of the whole vector; each surplus rank hands its vector over and gets the result."""

    words = "in a butterfly of exchanges"

    def steps(self, peers: Peers, x: Vector, operation: Operation) -> Steps:
        def within(number: int, rank_of: Callable[[int], int]) -> Steps:
            distance, powers = 1, largest_power(peers.size)
            while distance < powers:
                partner = rank_of(number ^ distance)
                # The same memory goes out and takes in: what arrives must not overtake what leaves.
                going = peers.send(partner, x, overwritten=True)
                yield from peers.finish(going, peers.receive(partner, x, operation, behind=going))
                distance *= 2

        yield from folded(peers, x, operation, within)

    def sent(self, nbytes: int, ranks: int, hosts: tuple[int, ...] = ()) -> Sent:
        steps, powers = ranks.bit_length() - 1, largest_power(ranks)
        messages = steps * powers + 2 * (ranks - powers)
        return Sent(ceil(messages / ranks), nbytes * messages // ranks)

    def link_seconds(self, nbytes: int, ranks: int, link: LinkTimes) -> float:
        steps, folds = ranks.bit_length() - 1, int(ranks > largest_power(ranks))
        moved = (steps * ONE_MEMORY + 2 * folds) * link.byte_s + (steps + folds) * link.reduce_byte_s
        return (steps + 2 * folds) * link.latency_s + nbytes * moved
