"""Messages between the ranks of one group, as generators that pause where they would have to wait.

A collective is a generator: it starts transfers and yields whenever none of them can make progress. Its driver decides
how to wait: a test alternates between all ranks in one thread, a rank spins briefly and then sleeps. So each algorithm
is written once for every transport and every way of waiting.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.comm.transfer import HAS_LEFT, HEADER, LARGE_BYTES, Receive, Send, Transfer, kind_of, zero_copy
from shoal.comm.transport.link import Link
from shoal.comm.vector import Operation, Vector


class Waits(Protocol):
    """A transfer that waits until its link has room (a Send), or data to read (any other)."""

    @property
    def link(self) -> Link: ...


Steps = Generator[Sequence[Waits], None, None]
"""A collective in progress; it yields the transfers it waits for."""


@dataclass(slots=True)
class Count:
    """Messages that a rank has sent, and their payload bytes: the quantities that the formulas of `wire.py` predict."""

    messages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Current:
    """The collective in progress."""

    number: int = 0
    kind: int = 0


class Peers:
    """A rank's view of its group: its members, their hosts, and the links to them."""

    def __init__(
        self,
        rank: int,
        size: int,
        links: Mapping[int, Link],
        *,
        hosts: Sequence[Sequence[int]] | None = None,
        inside: Peers | None = None,
    ) -> None:
        """`links`: by rank in this group; `inside`: the group that contains this one."""
        self.rank, self.size, self.links = rank, size, links
        self.hosts = tuple(tuple(host) for host in hosts) if hosts is not None else (tuple(range(size)),)
        self.sent: Count = inside.sent if inside is not None else Count()
        self._current: Current = inside._current if inside is not None else Current()

    def begin(self, kind: str, tag: int = 0) -> Peers:
        """Called first in each collective, on every rank; a rank with another tag is out of step."""
        self._current.number = (self._current.number + 1) & 0xFFFFFFFF
        self._current.kind = kind_of(kind, tag)
        return self

    def among(self, ranks: Sequence[int]) -> Peers:
        """A subset of the ranks, including this one, for a part of the current collective."""
        links = {place: self.links[rank] for place, rank in enumerate(ranks) if rank != self.rank}
        return Peers(ranks.index(self.rank), len(ranks), links, inside=self)

    def send(self, to: int, data: Vector, *, overwritten: bool = False) -> Send:
        """Starts at once: the peer may be waiting. `overwritten`: the same memory is received into."""
        self.sent.messages += 1
        self.sent.bytes += data.nbytes
        link, header = self.links[to], self._header(data)
        large = data.nbytes >= LARGE_BYTES
        if not large and link.put(header, data.bytes):
            return HAS_LEFT
        send = Send(link, header, data.bytes, zero_copy(header) if large and not overwritten else None)
        send.advance()
        return send

    def receive(
        self, source: int, into: Vector, operation: Operation | None = None, *, behind: Send | None = None
    ) -> Receive:
        """`behind`: the transfer that sends the memory which this one overwrites."""
        return Receive(self.links[source], self._header(into), into, operation, behind)

    def _header(self, data: Vector) -> bytes:
        return HEADER.pack(self._current.number, self._current.kind, data.nbytes)

    def finish(self, *transfers: Transfer, meanwhile: Sequence[Transfer] = ()) -> Steps:
        """Runs until all are done; advances others meanwhile."""
        needed: Sequence[Transfer] = transfers
        while True:
            moved = False
            for transfer in (*needed, *meanwhile):
                moved |= transfer.advance()
            needed = [transfer for transfer in needed if not transfer.done]
            if not needed:
                return
            meanwhile = [transfer for transfer in meanwhile if not transfer.done]
            if not moved:
                yield [*needed, *meanwhile]

    def close(self) -> None:
        for link in self.links.values():
            link.close()
