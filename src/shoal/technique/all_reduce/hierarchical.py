"""Two levels: dense and fast inside each host, one share of the vector for each rank between hosts.

    inside     reduce-scatter: rank i of a host holds part i of the host's sum
    between    all-reduce of part i among the ranks i of all hosts
    inside     all-gather

Hosts of unequal size have no rank i each; then the first rank of a host exchanges for all of it.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from shoal.comm.collectives.algorithms import AllReduce
from shoal.comm.collectives.tree import tree_broadcast, tree_reduce
from shoal.comm.wire import Sent
from shoal.technique.all_reduce.ring import ring, ring_all_gather, ring_reduce_scatter

if TYPE_CHECKING:
    from shoal.comm.network import NetworkTimes
    from shoal.comm.peers import Peers, Steps
    from shoal.comm.vector import Operation, Vector


class hierarchical(AllReduce):
    """Rings inside and between; or a tree inside each host and a ring of first ranks. A ring's bytes in either case."""

    words = "inside each host first, then between hosts"
    pattern = "hierarchical"
    by_hosts = True

    def steps(self, peers: Peers, x: Vector, operation: Operation) -> Steps:
        host = next(host for host in peers.hosts if peers.rank in host)
        place = host.index(peers.rank)
        inside = peers.among(host)
        if len({len(each) for each in peers.hosts}) > 1:
            yield from tree_reduce(inside, x, operation, root=0)
            if place == 0:
                yield from ring().steps(peers.among([each[0] for each in peers.hosts]), x, operation)
            yield from tree_broadcast(inside, x, root=0)
            return
        parts = x.parts(len(host))
        yield from ring_reduce_scatter(inside, parts, operation)
        yield from ring().steps(peers.among([each[place] for each in peers.hosts]), parts[place], operation)
        yield from ring_all_gather(inside, parts)

    def sent(self, nbytes: int, ranks: int, hosts: tuple[int, ...] = ()) -> Sent:
        if len(set(hosts)) == 1:
            messages = 2 * ranks * (hosts[0] - 1 + len(hosts) - 1)
        else:
            messages = 2 * (ranks - len(hosts)) + 2 * len(hosts) * (len(hosts) - 1)
        return Sent(ceil(messages / ranks), 2 * nbytes * (ranks - 1) // ranks)

    def serves(self, ranks: int, per_host: int) -> bool:
        return 1 < per_host < ranks and ranks % per_host == 0

    def seconds(self, nbytes: int, ranks: int, per_host: int, network: NetworkTimes) -> float:
        hosts = ceil(ranks / per_host)
        inner = ring().link_seconds(nbytes, per_host, network.inside) if per_host > 1 else 0.0
        outer = ring().link_seconds(nbytes // per_host, hosts, network.between) if hosts > 1 else 0.0
        return inner + outer
