"""Up a binomial tree and down again (`comm/collectives/tree.py`): ceil(log2 P) steps each way, and every rank but the
root sends the whole vector once up.
"""

from __future__ import annotations

from math import ceil, log2
from typing import TYPE_CHECKING

from shoal.comm.collectives.algorithms import AllReduce
from shoal.comm.collectives.tree import tree_broadcast, tree_reduce
from shoal.comm.wire import Sent

if TYPE_CHECKING:
    from shoal.comm.network import LinkTimes
    from shoal.comm.peers import Peers, Steps
    from shoal.comm.vector import Operation, Vector


class tree(AllReduce):
    """A reduction to the first rank and a broadcast from it."""

    words = "up and down a tree"
    pattern = "tree"

    def steps(self, peers: Peers, x: Vector, operation: Operation) -> Steps:
        yield from tree_reduce(peers, x, operation, root=0)
        yield from tree_broadcast(peers, x, root=0)

    def sent(self, nbytes: int, ranks: int, hosts: tuple[int, ...] = ()) -> Sent:
        # 2(P-1) messages of the whole vector in all.
        return Sent(ceil(2 * (ranks - 1) / ranks), 2 * nbytes * (ranks - 1) // ranks)

    def link_seconds(self, nbytes: int, ranks: int, link: LinkTimes) -> float:
        steps = ceil(log2(ranks))
        return 2 * steps * (link.latency_s + nbytes * link.byte_s) + steps * nbytes * link.reduce_byte_s
