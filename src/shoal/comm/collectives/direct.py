"""Each rank to each other, all at once: the fewest steps for collectives whose parts have one owner or one source.

P-1 messages from each rank, whatever the collective; parts are reduced in one order of ranks, so a repeated call
gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.comm.peers import Peers, Steps
from shoal.comm.vector import Operation, Vector


def direct_reduce_scatter(peers: Peers, parts: Sequence[Vector], into: Vector, operation: Operation) -> Steps:
    """`parts` are read only; `into` gets the reduced part of this rank's number."""
    size, rank = peers.size, peers.rank
    going = [peers.send((rank + d) % size, parts[(rank + d) % size]) for d in range(1, size)]
    into.copy_from(parts[rank])
    for d in range(1, size):
        # The others' parts are sent meanwhile, lest everyone wait for someone further on.
        coming = peers.receive((rank - d) % size, into, operation)
        yield from peers.finish(coming, meanwhile=going)
    yield from peers.finish(*going)


def direct_all_gather(peers: Peers, mine: Vector, parts: Sequence[Vector]) -> Steps:
    size, rank = peers.size, peers.rank
    going = [peers.send((rank + d) % size, mine) for d in range(1, size)]
    parts[rank].copy_from(mine)
    coming = [peers.receive((rank - d) % size, parts[(rank - d) % size]) for d in range(1, size)]
    yield from peers.finish(*going, *coming)


def direct_all_to_all(peers: Peers, going: Sequence[Vector], coming: Sequence[Vector]) -> Steps:
    size, rank = peers.size, peers.rank
    sends = [peers.send((rank + d) % size, going[(rank + d) % size]) for d in range(1, size)]
    coming[rank].copy_from(going[rank])
    receives = [peers.receive((rank - d) % size, coming[(rank - d) % size]) for d in range(1, size)]
    yield from peers.finish(*sends, *receives)


def gather(peers: Peers, mine: Vector, parts: Sequence[Vector] | None, *, root: int) -> Steps:
    if peers.rank != root:
        yield from peers.finish(peers.send(root, mine))
        return
    assert parts is not None
    parts[root].copy_from(mine)
    yield from peers.finish(*(peers.receive(other, parts[other]) for other in range(peers.size) if other != root))


def scatter(peers: Peers, parts: Sequence[Vector] | None, into: Vector, *, root: int) -> Steps:
    if peers.rank != root:
        yield from peers.finish(peers.receive(root, into))
        return
    assert parts is not None
    into.copy_from(parts[root])
    yield from peers.finish(*(peers.send(other, parts[other]) for other in range(peers.size) if other != root))


def barrier(peers: Peers, nothing: Vector) -> Steps:
    """Dissemination: in step k each rank tells the one 2^k ahead; after ceil(log2 P) steps all have heard of all."""
    distance = 1
    while distance < peers.size:
        ahead, behind = (peers.rank + distance) % peers.size, (peers.rank - distance) % peers.size
        yield from peers.finish(peers.send(ahead, nothing), peers.receive(behind, nothing))
        distance *= 2
