"""Links within one process: all ranks of a test live in one thread, or in one thread each."""

from __future__ import annotations

from shoal.comm.transport.link import Bytes, Link, PeerLost
from shoal.comm.transport.ring_buffer import HEADER, RingBuffer


class MemoryLink(Link):
    """A ring buffer each way, in plain memory."""

    def __init__(self, peer: int, outgoing: RingBuffer, incoming: RingBuffer) -> None:
        self.peer = peer
        self.gone = False
        """Set by a test that lets the peer die."""
        self._out, self._in = outgoing, incoming

    def write(self, data: Bytes) -> int:
        if self.gone:
            raise PeerLost(self.peer)
        return self._out.write(data)

    def put(self, header: bytes, payload: Bytes) -> bool:
        return not self.gone and self._out.put(header, payload)

    def window(self, most: int) -> Bytes:
        arrived = self._in.window(most)
        if self.gone and not len(arrived):
            raise PeerLost(self.peer)
        return arrived

    def consume(self, count: int) -> None:
        self._in.consume(count)

    def arm(self, *, to_write: bool) -> bool:
        return self._in.readable or (to_write and self._out.writable)

    def disarm(self) -> None:
        pass

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.gone = True


def memory_links(ranks: int, capacity: int = 1 << 12) -> list[dict[int, Link]]:
    """For each rank, its links to all others."""
    rings = {(a, b): bytearray(HEADER + capacity) for a in range(ranks) for b in range(ranks) if a != b}
    return [
        {b: MemoryLink(b, RingBuffer(rings[a, b]), RingBuffer(rings[b, a])) for b in range(ranks) if b != a}
        for a in range(ranks)
    ]
