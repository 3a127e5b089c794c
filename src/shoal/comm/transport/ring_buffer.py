"""A queue of bytes in a piece of memory, with one writer and one reader, possibly in two processes.

    0    head: bytes ever written          (the writer's)
    8    a word of the writer's own memory: its address, its value; whether the zero-copy payload is still valid
    64   tail: bytes ever read             (the reader's)
    72   whether the reader can read the writer's memory
    128  the reader sleeps, wake it        192  the writer sleeps, wake it
    256  the bytes, a power of two of them

Each counter has one owner and a cache line of its own, so no lock is needed: the writer publishes bytes by moving
head after they are in place, the reader gives room back by moving tail.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import numpy as np

from shoal.comm.transport.link import ALIGN, NO_BYTES, Bytes

HEADER = 256
HEAD, TAIL, READER_SLEEPS, WRITER_SLEEPS = 0, 8, 16, 24
WORD_ADDRESS, WORD_VALUE, LENT, FETCHES = 1, 2, 3, 9
"""Places of the counters, in words of eight bytes."""

_fence = Lock()


def fence() -> None:
    """No load or store moves across: an uncontended lock is taken and released by locked instructions."""
    with _fence:
        pass


class RingBuffer:
    """One direction of a link. The same memory is given to the writer's and to the reader's object."""

    def __init__(self, memory: Any) -> None:
        view = memoryview(memory)
        self.capacity = len(view) - HEADER
        if self.capacity <= 0 or self.capacity & (self.capacity - 1):
            raise ValueError(f"a ring buffer has a power of two of bytes, not {self.capacity}")
        self.words = view[:HEADER].cast("Q")
        """The counters, and what the link around this stores next to them."""
        self._view = view[HEADER:].cast("B")
        self._bytes: Bytes = np.frombuffer(self._view, dtype=np.uint8)
        self._mine = 0
        """The counter this side owns, so that it is never read back from memory that others can write."""

    def write(self, data: Bytes) -> int:
        head = self._mine
        room = self.capacity - (head - self.words[TAIL])
        at = head & (self.capacity - 1)
        count = min(room, len(data), self.capacity - at)
        if count:
            self._bytes[at : at + count] = data[:count]
            self._mine = head + count
            self.words[HEAD] = self._mine
        return count

    def put(self, header: bytes, payload: Bytes) -> bool:
        """A message of `header`, which is ALIGN bytes long, and `payload`, padded; False if it does not fit."""
        head, size = self._mine, len(payload)
        at, end = head & (self.capacity - 1), ALIGN + size + -size % ALIGN
        if end > self.capacity - max(at, head - self.words[TAIL]):
            return False
        self._view[at : at + ALIGN] = header
        self._bytes[at + ALIGN : at + ALIGN + size] = payload
        self._mine = self.words[HEAD] = head + end
        return True

    def window(self, most: int) -> Bytes:
        tail = self._mine
        at = tail & (self.capacity - 1)
        count = min(self.words[HEAD] - tail, most, self.capacity - at)
        return self._bytes[at : at + count] if count else NO_BYTES

    def consume(self, count: int) -> None:
        self._mine += count
        self.words[TAIL] = self._mine

    @property
    def readable(self) -> bool:
        return bool(self.words[HEAD] != self._mine)

    @property
    def writable(self) -> bool:
        return bool(self._mine - self.words[TAIL] < self.capacity)

    @property
    def drained(self) -> bool:
        """Whether all that was written has been read."""
        return bool(self.words[TAIL] == self._mine)

    def sleeps(self, side: int, yes: bool) -> None:
        self.words[side] = yes
        fence()

    def wakes(self, side: int) -> bool:
        """Whether the other side sleeps; it will be woken once."""
        with _fence:  # A fence, without the call: this is part of every message.
            pass
        if self.words[side]:
            self.words[side] = 0
            return True
        return False

    def close(self) -> None:
        self._bytes, self._view = NO_BYTES, memoryview(b"")
        self.words.release()
