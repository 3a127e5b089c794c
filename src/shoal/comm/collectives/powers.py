"""Algorithms for powers of two on any number of ranks: the surplus is folded onto partners first.

With P = 2^k + r the first 2r ranks pair up; the odd one of each pair hands its vector to the even one and waits for
the result. Numbers are then counted among the 2^k that are left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.comm.peers import Peers, Steps
    from shoal.comm.vector import Operation, Vector

    Within = Callable[[int, Callable[[int], int]], Steps]
    """The algorithm among 2^k: given this rank's number there, and how such a number becomes a rank."""


def largest_power(ranks: int) -> int:
    return 1 << (ranks.bit_length() - 1)


def folded(peers: Peers, x: Vector, operation: Operation, within: Within) -> Steps:
    surplus = peers.size - largest_power(peers.size)
    rank = peers.rank
    if rank < 2 * surplus and rank % 2:
        yield from peers.finish(peers.send(rank - 1, x))
        yield from peers.finish(peers.receive(rank - 1, x))
        return
    folds = rank < 2 * surplus
    if folds:
        yield from peers.finish(peers.receive(rank + 1, x, operation))
    number = rank // 2 if folds else rank - surplus
    yield from within(number, lambda other: 2 * other if other < surplus else other + surplus)
    if folds:
        yield from peers.finish(peers.send(rank + 1, x))
