"""Sends or receives one message: written in pieces, at once or zero-copy, and copied or reduced into place.

Each message carries the number of its collective, its kind and its size. Ranks that are out of step get an error that
names both sides, instead of silently reducing unrelated tensors.
"""

from __future__ import annotations

import sys
from struct import Struct

import numpy as np

from shoal.comm.transport.link import ALIGN, Bytes, Link
from shoal.comm.vector import Operation, Vector

KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)

HEADER = Struct("<IIQ")
"""Number of the collective in its group, its kind, bytes that follow. As long as ALIGN."""

SMALL_BYTES = 8192
"""Up to this size header and payload are sent and read together: a copy is cheaper than a second wake-up or packet."""

LARGE_BYTES = 1 << 18
"""From this size on a message is sent zero-copy if the link can: the reader copies it from the sender's memory, which
costs less than two copies."""
_ZERO_COPY = 1 << 31
"""Flag in the kind of such a message: the address of its payload follows instead of the payload."""


_TAG = 8
"""Bits of the kind below the caller's tag: ranks must give the same tag to the same collective."""
MOST_TAG = (1 << (31 - _TAG)) - 1


class OutOfStep(RuntimeError):
    """Ranks of a group called different collectives."""

    def __init__(self, message: str, peer: int = -1, theirs: int = 0, mine: int = 0) -> None:
        super().__init__(message, peer, theirs, mine)
        self.peer, self.theirs, self.mine = peer, theirs, mine
        """The other rank, and the tags of both ranks' collectives; 0: none."""

    def __str__(self) -> str:
        return str(self.args[0])


def kind_of(kind: str, tag: int) -> int:
    """A kind of collective and the caller's tag as one number of the header."""
    return KINDS.index(kind) | (tag % (MOST_TAG + 1)) << _TAG


class Send:
    """One outgoing message."""

    __slots__ = ("_at", "_header", "_payload", "_pieces", "_zero_copy_header", "done", "link", "sent")

    def __init__(self, link: Link, header: bytes, payload: Bytes, zero_copy_header: bytes | None = None) -> None:
        """`zero_copy_header`: the header if the link may send it zero-copy; the memory must not change meanwhile."""
        self.link = link
        self.done = False
        self.sent = 0
        """Bytes of the payload that were sent; a receive into the same memory must stay behind it."""
        self._header, self._payload, self._zero_copy_header = header, payload, zero_copy_header
        self._pieces: list[Bytes] | None = None
        self._at = 0

    def advance(self) -> bool:
        """Sends as much as possible; returns whether anything was sent."""
        if self.done:
            return False
        if self._pieces is None:
            if self._zero_copy_header is not None and self.link.lend(self._zero_copy_header, self._payload):
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
    """A message that the link accepted at once. One instance serves all of them: it has no state."""

    __slots__ = ()

    def __init__(self) -> None:
        self.done = True
        self.sent = sys.maxsize


HAS_LEFT = _HasLeft()


class Receive:
    """One incoming message, copied or reduced into place."""

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
        """Bytes of payload and padding received so far."""
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
                # A send from the same memory is as small, so it has been sent or copied.
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
                if size >= LARGE_BYTES and link.ask_to_lend() and self._got == zero_copy(self._header):
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
        """Copies a zero-copy payload from the peer's memory. Consuming its address signals the peer that it is done."""
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
            number, kind, size = HEADER.unpack(got)
            kind &= ~_ZERO_COPY
            mine = HEADER.unpack(self._header)
            tag, kind = kind >> _TAG, kind & ((1 << _TAG) - 1)
            mine_tag, mine_kind = mine[1] >> _TAG, mine[1] & ((1 << _TAG) - 1)
            theirs = KINDS[kind] if kind < len(KINDS) else f"kind {kind}"
            raise OutOfStep(
                f"rank {self.link.peer} sent {size} bytes of {theirs}, its collective number {number} in this group, "
                f"while this rank expects {mine[2]} bytes of {KINDS[mine_kind]}, its number {mine[0]}. Ranks of a "
                "group must call the same collectives in the same order, with tensors of the same size.",
                self.link.peer,
                tag,
                mine_tag,
            )


def zero_copy(header: bytes) -> bytes:
    """The header of the same message, sent zero-copy."""
    number, kind, size = HEADER.unpack(header)
    return HEADER.pack(number, kind | _ZERO_COPY, size)


Transfer = Send | Receive
