"""Links between hosts: one TCP connection each, never blocking."""

from __future__ import annotations

import socket

import numpy as np

from shoal.comm.transport.link import ALIGN, Bytes, Link, PeerLost

SCRATCH = 1 << 18
"""Bytes that may wait here to be reduced; what is only copied goes straight into place."""


class TcpLink(Link):
    """A connection that was made and recognised by `connect.py`."""

    polls_writing = True

    def __init__(self, peer: int, connection: socket.socket, scratch: int = SCRATCH) -> None:
        self.peer = peer
        self._connection = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._scratch: Bytes = np.empty(scratch, dtype=np.uint8)
        self._low = self._high = 0
        self._consumed = 0
        """Bytes of the stream so far: numbers lie in the scratch as they are aligned in the stream."""
        self._gone: str | None = None

    def write(self, data: Bytes) -> int:
        if self._gone:
            raise PeerLost(self.peer, self._gone)
        try:
            return self._connection.send(data.data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._gone = f"its connection broke ({error})"
            raise PeerLost(self.peer, self._gone) from error

    def window(self, most: int) -> Bytes:
        if self._low == self._high:
            self._low = self._high = self._consumed % ALIGN
        elif self._low > SCRATCH // 2 and self._high - self._low < min(most, SCRATCH // 2):
            start = self._consumed % ALIGN
            left = self._scratch[self._low : self._high].copy()
            self._scratch[start : start + len(left)] = left
            self._low, self._high = start, start + len(left)
        if self._high - self._low < most and self._high < SCRATCH:
            self._high += self._receive(self._scratch[self._high :], nothing_else=self._low == self._high)
        return self._scratch[self._low : min(self._high, self._low + most)]

    def consume(self, count: int) -> None:
        self._low += count
        self._consumed += count

    def read(self, into: Bytes) -> int:
        if self._low < self._high or len(into) < SCRATCH // 4:
            return super().read(into)
        count = self._receive(into, nothing_else=True)
        self._consumed += count
        return count

    def _receive(self, into: Bytes, *, nothing_else: bool) -> int:
        if self._gone is None:
            try:
                count = self._connection.recv_into(into.data)
                if count:
                    return count
                self._gone = "it closed the connection"
            except BlockingIOError:
                return 0
            except OSError as error:
                self._gone = f"its connection broke ({error})"
        if nothing_else:
            raise PeerLost(self.peer, self._gone)
        return 0

    def arm(self, *, to_write: bool) -> bool:
        return self._gone is not None or self._low < self._high

    def disarm(self) -> None:
        pass

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._gone = "this link was closed"
        self._connection.close()
