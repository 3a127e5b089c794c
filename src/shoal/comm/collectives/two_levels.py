"""Reduce-scatter and all-gather on several hosts: what leaves a host leaves it once, by one rank.

    all-gather        between: each rank's part to the ranks of its place on the other hosts; then inside each host
    reduce-scatter    inside: each host's sum of a part, at the rank of the owner's place; then between, to the owner

Each rank to each other would send every part to all g ranks of every other host. Here h hosts of g ranks send g times
less over the links between them, and the same in all: P-1 messages and n(P-1)/P bytes from each rank. Between two
ranks messages follow one another in the order of hosts, beginning with the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.comm.peers import Peers, Steps, Transfer
from shoal.comm.vector import Operation, Vector


def two_level_all_gather(peers: Peers, mine: Vector, parts: Sequence[Vector]) -> Steps:
    host, place, others = _around(peers)
    between: list[tuple[int, Transfer, Transfer]] = []
    for other in others:
        twin = other[place]
        between.append((twin, peers.receive(twin, parts[twin]), peers.send(twin, mine)))
    meanwhile = [transfer for _, *both in between for transfer in both]
    parts[peers.rank].copy_from(mine)
    yield from peers.finish(*_round(peers, host, host, place, mine, parts), meanwhile=meanwhile)
    for other, (twin, arrives, _) in zip(others, between, strict=True):
        yield from peers.finish(arrives, meanwhile=meanwhile)
        yield from peers.finish(*_round(peers, host, other, place, parts[twin], parts), meanwhile=meanwhile)
    yield from peers.finish(*meanwhile)


def _round(
    peers: Peers, host: Sequence[int], source: Sequence[int], place: int, going: Vector, parts: Sequence[Vector]
) -> list[Transfer]:
    """Inside the host: the part of this place on some host to all, and theirs of the other places."""
    found: list[Transfer] = []
    for d in range(1, len(host)):
        ahead, behind = (place + d) % len(host), (place - d) % len(host)
        found += [peers.send(host[ahead], going), peers.receive(host[behind], parts[source[behind]])]
    return found


def two_level_reduce_scatter(peers: Peers, parts: Sequence[Vector], into: Vector, operation: Operation) -> Steps:
    """`parts` are read only; `into` gets the reduced part of this rank's number."""
    host, place, others = _around(peers)
    leaving: list[Transfer] = []
    totals = [*(parts[other[place]].like() for other in others), into]
    """All are kept to the end: a message reads the memory, but does not hold it."""
    for target, total in zip([*others, host], totals, strict=True):
        total.copy_from(parts[target[place]])
        going = [
            peers.send(host[ahead], parts[target[ahead]])
            for d in range(1, len(host))
            for ahead in [(place + d) % len(host)]
        ]
        for d in range(1, len(host)):
            # One after the other, so that a repeated call adds in the same order.
            coming = peers.receive(host[(place - d) % len(host)], total, operation)
            yield from peers.finish(coming, meanwhile=[*going, *leaving])
        yield from peers.finish(*going, meanwhile=leaving)
        if target is not host:
            leaving.append(peers.send(target[place], total))
    for other in reversed(others):
        yield from peers.finish(peers.receive(other[place], into, operation), meanwhile=leaving)
    yield from peers.finish(*leaving)


def _around(peers: Peers) -> tuple[Sequence[int], int, list[Sequence[int]]]:
    """This rank's host, its place there, and the other hosts, beginning with the next."""
    at = next(n for n, host in enumerate(peers.hosts) if peers.rank in host)
    host = peers.hosts[at]
    return host, host.index(peers.rank), [*peers.hosts[at + 1 :], *peers.hosts[:at]]


def has_two_levels(hosts: Sequence[Sequence[int]]) -> bool:
    """Whether there are several hosts of equally many ranks, and more than one."""
    sizes = {len(host) for host in hosts}
    return len(hosts) > 1 and len(sizes) == 1 and sizes != {1}
