"""Recursive halving, then recursive doubling: a ring's bytes in a butterfly's number of steps.

In each of log2 P steps a rank keeps one half of its range, gets its partner's numbers for it and hands over the other;
then the ranges are put together again in the opposite order.
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


class rabenseifner(AllReduce):
    """Halves of halves, then doubles of doubles; surplus ranks are folded onto partners first."""

    words = "in halves and doubles (Rabenseifner)"

    def steps(self, peers: Peers, x: Vector, operation: Operation) -> Steps:
        from shoal.comm.vector import even_ranges

        powers = largest_power(peers.size)
        ranges = even_ranges(len(x), powers)

        def piece(low: int, high: int) -> Vector:
            return x.slice(ranges[low][0], ranges[high - 1][1])

        def within(number: int, rank_of: Callable[[int], int]) -> Steps:
            low, high = 0, powers
            halves = []
            distance = powers // 2
            while distance:
                partner, middle = rank_of(number ^ distance), low + distance
                mine, theirs = ((middle, high), (low, middle)) if number & distance else ((low, middle), (middle, high))
                going, coming = piece(*theirs), piece(*mine)
                yield from peers.finish(peers.send(partner, going), peers.receive(partner, coming, operation))
                halves.append((partner, mine, theirs))
                low, high = mine
                distance //= 2
            for partner, mine, theirs in reversed(halves):
                yield from peers.finish(peers.send(partner, piece(*mine)), peers.receive(partner, piece(*theirs)))

        yield from folded(peers, x, operation, within)

    def sent(self, nbytes: int, ranks: int, hosts: tuple[int, ...] = ()) -> Sent:
        steps, powers = ranks.bit_length() - 1, largest_power(ranks)
        messages = 2 * steps * powers + 2 * (ranks - powers)
        return Sent(ceil(messages / ranks), 2 * nbytes * (ranks - 1) // ranks)

    def link_seconds(self, nbytes: int, ranks: int, link: LinkTimes) -> float:
        steps, powers = ranks.bit_length() - 1, largest_power(ranks)
        folds, part = int(ranks > powers), 1 - 1 / powers
        moved = (2 * part + 2 * folds) * link.byte_s + (part + folds) * link.reduce_byte_s
        return (2 * steps + 2 * folds) * link.latency_s + nbytes * moved
