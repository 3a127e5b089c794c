"""Along a binomial tree: ceil(log2 P) steps, each rank but the root sends (or gets) the whole vector once.

Numbers are counted from the root. In step d a rank whose lowest set bit is d has a parent d below it; so half of those
that are left drop out in each step on the way up, and join in the opposite order on the way down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.comm.peers import Peers, Steps
    from shoal.comm.vector import Operation, Vector


def tree_reduce(peers: Peers, x: Vector, operation: Operation, *, root: int) -> Steps:
    """In place, everywhere: ranks on the way hold sums of those below them."""
    place = (peers.rank - root) % peers.size
    distance = 1
    while distance < peers.size:
        if place & distance:
            yield from peers.finish(peers.send((peers.rank - distance) % peers.size, x))
            return
        if place + distance < peers.size:
            yield from peers.finish(peers.receive((peers.rank + distance) % peers.size, x, operation))
        distance *= 2


def tree_broadcast(peers: Peers, x: Vector, *, root: int) -> Steps:
    place = (peers.rank - root) % peers.size
    distance = 1
    while distance < peers.size and not place & distance:
        distance *= 2
    if place:
        yield from peers.finish(peers.receive((peers.rank - distance) % peers.size, x))
    children = []
    while distance > 1:
        distance //= 2
        if place + distance < peers.size:
            children.append(peers.send((peers.rank + distance) % peers.size, x))
    yield from peers.finish(*children)
