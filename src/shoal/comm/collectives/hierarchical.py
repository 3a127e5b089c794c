"""Two levels: dense and fast inside each host, one share of the vector for each rank between hosts.

    inside     reduce-scatter: rank i of a host holds part i of the host's sum
    between    all-reduce of part i among the ranks i of all hosts
    inside     all-gather

Hosts of unequal size have no rank i each; then the first rank of a host speaks for it.
"""

from __future__ import annotations

from shoal.comm.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from shoal.comm.collectives.tree import tree_broadcast, tree_reduce
from shoal.comm.peers import Peers, Steps
from shoal.comm.vector import Operation, Vector


def hierarchical_all_reduce(peers: Peers, x: Vector, operation: Operation) -> Steps:
    host = next(host for host in peers.hosts if peers.rank in host)
    place = host.index(peers.rank)
    inside = peers.among(host)
    if len({len(each) for each in peers.hosts}) > 1:
        yield from tree_reduce(inside, x, operation, root=0)
        if place == 0:
            yield from ring_all_reduce(peers.among([each[0] for each in peers.hosts]), x, operation)
        yield from tree_broadcast(inside, x, root=0)
        return
    parts = x.parts(len(host))
    yield from ring_reduce_scatter(inside, parts, operation)
    yield from ring_all_reduce(peers.among([each[place] for each in peers.hosts]), parts[place], operation)
    yield from ring_all_gather(inside, parts)
