"""Messages between the ranks of one group, as generators that pause where they would have to wait.

A collective is a generator: it starts transfers and pauses (yields) whenever none of them can move. Whoever holds it
decides what waiting means: a test takes turns between all ranks in one thread, a rank spins a little and then
sleeps. So each algorithm is written once for every carrier and every way of waiting.

Each message carries the number of the collective it belongs to, its kind and its size. Ranks that have lost step with
each other are told so, with both sides named, instead of adding apples to pears.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Protocol

import numpy as np

from shoal.comm.transport.link import ALIGN, Bytes, Link
from shoal.comm.vector import Operation, Vector

KINDS = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter", "barrier",
)  # fmt: skip

_HEADER = Struct("<IIQ")
"""Number of the collective in its group, its kind, bytes that follow. As long as ALIGN."""

SMALL_BYTES = 8192
"""Up to here header and payload travel in one piece and are taken in one: a copy is cheaper than a second wake-up or
packet."""

LARGE_BYTES = 1 << 18
"""From here on a message is lent where the link can: reading it from the peer's memory costs less than two copies."""
_LENT = 1 << 31
"""Added to the kind of such a message: the place of its payload follows, and not the payload."""


class OutOfStep(RuntimeError):
    """Ranks of a group called different collectives."""


class Send:
    """One message on its way out."""

    __slots__ = ("_at", "_header", "_lent_header", "_payload", "_pieces", "done", "link", "sent")

    def __init__(self, link: Link, header: bytes, payload: Bytes, lent_header: bytes | None = None) -> None:
        """`lent_header`: how the message begins if the link may lend it, which needs memory that nobody changes."""
        self.link = link
        self.done = False
        self.sent = 0
        """Bytes of the payload that were taken; a reader of the same memory must stay behind it."""
        self._header, self._payload, self._lent_header = header, payload, lent_header
        self._pieces: list[Bytes] | None = None
        self._at = 0

    def advance(self) -> bool:
        """Moves what can be moved; whether anything was."""
        if self.done:
            return False
        if self._pieces is None:
            if self._lent_header is not None and self.link.lend(self._lent_header, self._payload):
                self._pieces = []
                return True
            if self.link.put(self._header, self._payload):
                self.sent = len(self._payload)
                self.done = True
                return True
            self._pieces = self._cut()
        moved = False
        while self._pieces:
            piece = self._pieces[0]
            took = self.link.write(piece[self._at :] if self._at else piece)
            if not took:
                return moved
            moved = True
            self._at += took
            if piece is self._payload:
                self.sent = self._at
            if self._at == len(piece):
                self._pieces.pop(0)
                self._at = 0
        self.done = self.link.returned()
        return moved or self.done

    def _cut(self) -> list[Bytes]:
        header, payload, padding = self._header, self._payload, bytes(-len(self._payload) % ALIGN)
        if len(payload) <= SMALL_BYTES:
            self.sent = len(payload)
            return [np.frombuffer(header + payload.tobytes() + padding, dtype=np.uint8)]
        pieces = [np.frombuffer(header, dtype=np.uint8), payload]
        return [*pieces, np.frombuffer(padding, dtype=np.uint8)] if padding else pieces


class _HasLeft(Send):
    """A message that the link took whole. One stands for all of them: there is nothing left to do."""

    __slots__ = ()

    def __init__(self) -> None:
        self.done = True
        self.sent = sys.maxsize


HAS_LEFT = _HasLeft()


class Receive:
    """One message on its way in, written or reduced into place."""

    __slots__ = ("_at", "_behind", "_end", "_got", "_header", "_operation", "done", "into", "link")

    def __init__(
        self, link: Link, header: bytes, into: Vector, operation: Operation | None, behind: Send | None
    ) -> None:
        self.link = link
        self.into = into
        self.done = False
        self._header = header
        self._operation = operation
        self._behind = behind
        self._got = b""
        self._at = 0
        """Bytes of the payload, and of what pads it, that are in place."""
        self._end = into.nbytes + -into.nbytes % ALIGN

    def advance(self) -> bool:
        if self.done:
            return False
        link, size = self.link, self.into.nbytes
        moved = False
        if size <= SMALL_BYTES and not self._got:
            whole = link.window(ALIGN + self._end)
            if len(whole) == ALIGN + self._end:
                self._check(whole[:ALIGN].tobytes())
                # What leaves the same memory is as small, so it has left or was copied.
                if size:
                    self._place(0, whole[ALIGN : ALIGN + size])
                link.consume(ALIGN + self._end)
                self.done = True
                return True
        while len(self._got) < ALIGN:
            arrived = link.window(ALIGN - len(self._got))
            if not len(arrived):
                return moved
            moved = True
            self._got += arrived.tobytes()
            link.consume(len(arrived))
            if len(self._got) == ALIGN:
                if size >= LARGE_BYTES and link.ask_to_lend() and self._got == _lent(self._header):
                    self._fetch()
                    self.done = True
                    return True
                self._check(self._got)
        while self._at < size:
            took = self._take(size - self._at)
            if not took:
                return moved
            moved = True
            self._at += took
        while self._at < self._end:
            took = len(link.window(self._end - self._at))
            if not took:
                return moved
            link.consume(took)
            self._at += took
            moved = True
        self.done = True
        return moved

    def _place(self, at: int, arrived: Bytes) -> None:
        if self._operation is not None:
            self.into.reduce(at, arrived, self._operation)
        else:
            self.into.bytes[at : at + len(arrived)] = arrived

    def _fetch(self) -> None:
        """What was lent is all there. Giving its place back tells the peer that we have it."""
        place = self.link.window(ALIGN)
        if self._operation is None:
            self.link.fetch(place, 0, self.into.bytes)
        else:
            scratch = np.empty(LARGE_BYTES, dtype=np.uint8)
            for start in range(0, self.into.nbytes, LARGE_BYTES):
                part = scratch[: self.into.nbytes - start]
                self.link.fetch(place, start, part)
                self._place(start, part)
        self.link.consume(ALIGN)

    def _take(self, most: int) -> int:
        if self._behind is not None:
            most = min(most, self._behind.sent - self._at)
            if most <= 0:
                return 0
        if self._operation is None:
            return self.link.read(self.into.bytes[self._at : self._at + most])
        arrived = self.link.window(most)
        count = len(arrived) - len(arrived) % self.into.itemsize
        if count:
            self._place(self._at, arrived[:count])
            self.link.consume(count)
        return count

    def _check(self, got: bytes) -> None:
        if got != self._header:
            number, kind, size = _HEADER.unpack(got)
            kind &= ~_LENT
            mine = _HEADER.unpack(self._header)
            theirs = KINDS[kind] if kind < len(KINDS) else f"kind {kind}"
            raise OutOfStep(
                f"rank {self.link.peer} sent {size} bytes of {theirs}, its collective number {number} in this group, "
                f"while this rank expects {mine[2]} bytes of {KINDS[mine[1]]}, its number {mine[0]}. Ranks of a group "
                "have to call the same collectives in the same order, with tensors of the same size."
            )


def _lent(header: bytes) -> bytes:
    number, kind, size = _HEADER.unpack(header)
    return _HEADER.pack(number, kind | _LENT, size)


Transfer = Send | Receive


class Waits(Protocol):
    """Something that cannot go on before its link has room (a Send), or something to read (anything else)."""

    @property
    def link(self) -> Link: ...


Steps = Generator[Sequence[Waits], None, None]
"""A collective under way; it yields what it waits for."""


@dataclass(slots=True)
class Count:
    """Messages that a rank has sent, and the bytes of their payload: what the formulas of `wire.py` predict."""

    messages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Current:
    """The collective under way."""

    number: int = 0
    kind: int = 0


class Peers:
    """A rank's view of its group: who is in it, on which hosts they are, and how to reach them."""

    def __init__(
        self,
        rank: int,
        size: int,
        links: Mapping[int, Link],
        *,
        hosts: Sequence[Sequence[int]] | None = None,
        inside: Peers | None = None,
    ) -> None:
        """`links` are by rank in this group; `inside` is the group of which this is a part."""
        self.rank, self.size, self.links = rank, size, links
        self.hosts = tuple(tuple(host) for host in hosts) if hosts is not None else (tuple(range(size)),)
        self.sent: Count = inside.sent if inside is not None else Count()
        self._current: Current = inside._current if inside is not None else Current()

    def begin(self, kind: str) -> Peers:
        """The first step of each collective, on every rank alike."""
        self._current.number = (self._current.number + 1) & 0xFFFFFFFF
        self._current.kind = KINDS.index(kind)
        return self

    def among(self, ranks: Sequence[int]) -> Peers:
        """Some of the ranks, this one included, for a part of the collective under way."""
        links = {place: self.links[rank] for place, rank in enumerate(ranks) if rank != self.rank}
        return Peers(ranks.index(self.rank), len(ranks), links, inside=self)

    def send(self, to: int, data: Vector, *, overwritten: bool = False) -> Send:
        """Sets off at once: the other may be waiting. `overwritten`: what arrives goes into the same memory."""
        self.sent.messages += 1
        self.sent.bytes += data.nbytes
        link, header = self.links[to], self._header(data)
        large = data.nbytes >= LARGE_BYTES
        if not large and link.put(header, data.bytes):
            return HAS_LEFT
        send = Send(link, header, data.bytes, _lent(header) if large and not overwritten else None)
        send.advance()
        return send

    def receive(
        self, source: int, into: Vector, operation: Operation | None = None, *, behind: Send | None = None
    ) -> Receive:
        """`behind` names the transfer that sends the very memory this one writes."""
        return Receive(self.links[source], self._header(into), into, operation, behind)

    def _header(self, data: Vector) -> bytes:
        return _HEADER.pack(self._current.number, self._current.kind, data.nbytes)

    def finish(self, *transfers: Transfer, meanwhile: Sequence[Transfer] = ()) -> Steps:
        """Until all are done; others are moved along meanwhile."""
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
