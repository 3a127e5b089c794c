"""Links between hosts whose every byte is authenticated: the stream is cut into blocks, each with a number and a tag.

    number (8 bytes)   payload bytes (8)   payload, padded to a multiple of ALIGN   tag (16)

Numbers count from 0 in each direction, and the two directions have keys of their own, so a block that was altered,
left out, repeated, reordered or sent back is found. Bytes are shown to a reader only after their tag was checked.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
from struct import Struct

import numpy as np

from shoal.comm.transport.link import ALIGN, NO_BYTES, Bytes, LinkAltered, PeerLost
from shoal.comm.transport.protection import TAG_BYTES, Tag
from shoal.comm.transport.tcp import TcpLink

_HEADER = Struct("<QQ")
"""As long as ALIGN, so that numbers in the payload are aligned."""
MOST_BYTES = 1 << 16
"""Payload of a block. Larger ones are no faster to check, and are checked later."""
BUFFER = 4 * (MOST_BYTES + ALIGN + TAG_BYTES)


class SignedTcpLink(TcpLink):
    """A TCP link with a tag for what it sends and one for what it receives."""

    def __init__(self, peer: int, connection: socket.socket, sends: Tag, receives: Tag) -> None:
        super().__init__(peer, connection, scratch=BUFFER)
        self._sends, self._receives = sends, receives
        self._sent = self._received = 0
        """Blocks."""
        self._block: Bytes = np.empty(MOST_BYTES + ALIGN + TAG_BYTES, dtype=np.uint8)
        self._pending: Bytes = NO_BYTES
        """Of a block that the connection has not taken fully."""
        self._taken = 0
        """Bytes of the stream in that block; they count as written when it has left."""
        self._from = self._to = 0
        """Bytes of the scratch that were checked and not yet consumed; what follows them is not checked."""

    def write(self, data: Bytes) -> int:
        if not len(self._pending):
            count = min(len(data), MOST_BYTES)
            if not count:
                return 0
            self._pending, self._taken = self._sealed(data[:count]), count
        # Until the block has left, the same bytes are written again: a message is written by one transfer at a time.
        self._pending = self._pending[super().write(self._pending) :]
        return 0 if len(self._pending) else self._taken

    def _sealed(self, data: Bytes) -> Bytes:
        end = ALIGN + len(data) + -len(data) % ALIGN
        block = self._block
        block[:ALIGN] = np.frombuffer(_HEADER.pack(self._sent, len(data)), dtype=np.uint8)
        block[ALIGN : ALIGN + len(data)] = data
        block[ALIGN + len(data) : end] = 0
        block[end : end + TAG_BYTES] = np.frombuffer(self._sends(self._sent, block[:end].data), dtype=np.uint8)
        self._sent += 1
        return block[: end + TAG_BYTES]

    def window(self, most: int) -> Bytes:
        if self._from == self._to and most and not self._next():
            return NO_BYTES
        return self._scratch[self._from : min(self._to, self._from + most)]

    def consume(self, count: int) -> None:
        self._from += count

    def read(self, into: Bytes) -> int:
        arrived = self.window(len(into))
        count = len(arrived)
        if count:
            into[:count] = arrived
            self.consume(count)
        return count

    def _next(self) -> bool:
        """Checks the next block, if it is all there."""
        needed = self._needed()
        while self._high - self._low < needed:
            if self._low + needed > len(self._scratch):
                left = self._scratch[self._low : self._high].copy()
                self._scratch[: len(left)] = left
                self._low, self._high = 0, len(left)
            elif self._low == self._high:
                self._low = self._high = 0
            got = self._receive(self._scratch[self._high :], nothing_else=True)
            self._high += got
            if not got:
                return False
            needed = self._needed()
        number, size = _HEADER.unpack(self._scratch[self._low : self._low + ALIGN].tobytes())
        end = self._low + needed - TAG_BYTES
        tag = self._receives(self._received, self._scratch[self._low : end].data)
        same = hmac.compare_digest(tag, self._scratch[end : end + TAG_BYTES].tobytes())
        if not same or number != self._received:
            raise self._altered()
        self._received += 1
        self._from, self._to = self._low + ALIGN, self._low + ALIGN + size
        self._low += needed
        return True

    def _needed(self) -> int:
        """Bytes of the next block, as far as that is known."""
        if self._high - self._low < ALIGN:
            return ALIGN
        _, size = _HEADER.unpack(self._scratch[self._low : self._low + ALIGN].tobytes())
        if not 0 < size <= MOST_BYTES:
            raise self._altered()
        return int(ALIGN + size + -size % ALIGN + TAG_BYTES)

    def _altered(self) -> PeerLost:
        error = LinkAltered(self.peer, self._received)
        self._gone = str(error)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        return error

    def arm(self, *, to_write: bool) -> bool:
        if self._gone is not None or self._from < self._to:
            return True
        return self._high - self._low >= ALIGN and self._high - self._low >= self._needed()
