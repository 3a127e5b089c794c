"""Links between processes of one host: a ring buffer each way in nameless memory, and a socket to wake up by.

Large messages are zero-copy: the reader copies the payload from the writer's memory, where the kernel permits that.
The memory is an anonymous file that only the two processes hold, so the kernel takes it back however they end. The
socket carries a byte when the other side sleeps, and its end of file shows at once that a process has exited.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import socket
from struct import Struct

import numpy as np

from shoal.comm.transport.link import Bytes, Link, PeerLost
from shoal.comm.transport.peer_memory import PeerMemory
from shoal.comm.transport.ring_buffer import (
    FETCHES,
    HEADER,
    LENT,
    READER_SLEEPS,
    WORD_ADDRESS,
    WORD_VALUE,
    WRITER_SLEEPS,
    RingBuffer,
)

_PLACE = Struct("<QQ")
"""The address of a zero-copy payload, and padding. As long as ALIGN."""

CAPACITY = 1 << 20
"""Bytes on their way, each way. Half of a second-level cache: larger ones cost memory and gain nothing measurable."""


class SharedLink(Link):
    """Both ring buffers lie in one mapping; `first`: whether this side writes the first of them."""

    def __init__(self, peer: int, waker: socket.socket, memory: mmap.mmap, *, first: bool) -> None:
        self.peer = peer
        self._waker = waker
        self._memory = memory
        half = len(memory) // 2
        view = memoryview(memory)
        self._out, self._in = (
            RingBuffer(view[:half] if first else view[half:]),
            RingBuffer(view[half:] if first else view[:half]),
        )
        self._gone: str | None = None
        self._peer_memory = PeerMemory(waker)
        self._word = ctypes.c_uint64(secrets.randbits(63))
        """What the peer reads to find out whether it can."""
        self._out.words[WORD_VALUE] = self._word.value
        self._out.words[WORD_ADDRESS] = ctypes.addressof(self._word)
        self._tried = self._lends = False

    def write(self, data: Bytes) -> int:
        if self._gone:
            raise PeerLost(self.peer, self._gone)
        count = self._out.write(data)
        if count and self._out.wakes(READER_SLEEPS):
            self._wake()
        return count

    def put(self, header: bytes, payload: Bytes) -> bool:
        if self._gone or not self._out.put(header, payload):
            return False
        if self._out.wakes(READER_SLEEPS):
            self._wake()
        return True

    def lend(self, header: bytes, payload: Bytes) -> bool:
        if self._gone or not self._out.words[FETCHES]:
            return False
        self._out.words[LENT] = 1
        self._lends = self.put(header, np.frombuffer(_PLACE.pack(payload.ctypes.data, 0), dtype=np.uint8))
        return self._lends

    def returned(self) -> bool:
        if self._lends and self._gone:
            raise PeerLost(self.peer, self._gone)
        self._lends = self._lends and not self._out.drained
        return not self._lends

    def fetch(self, place: Bytes, start: int, into: Bytes) -> None:
        address, _ = _PLACE.unpack(place.tobytes())
        try:
            self._peer_memory.fetch(address + start, into)
        except OSError as error:
            raise PeerLost(self.peer, f"its memory cannot be read ({error})") from error
        if not self._in.words[LENT]:
            raise PeerLost(self.peer, "it gave up on the message it was sending")

    def ask_to_lend(self) -> bool:
        words = self._in.words
        if not self._tried:
            self._tried = True
            words[FETCHES] = self._peer_memory.shows(words[WORD_ADDRESS], words[WORD_VALUE])
        return bool(words[FETCHES])

    def take_back(self) -> bool:
        taken, self._lends = self._lends, False
        if taken:
            self._out.words[LENT] = 0
        return taken

    def window(self, most: int) -> Bytes:
        arrived = self._in.window(most)
        if self._gone and most and not len(arrived):
            raise PeerLost(self.peer, self._gone)
        return arrived

    def consume(self, count: int) -> None:
        self._in.consume(count)
        if self._in.wakes(WRITER_SLEEPS):
            self._wake()

    def _wake(self) -> None:
        # A full socket wakes as well as an empty one, and a broken one is found by whoever sleeps on it.
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def arm(self, *, to_write: bool) -> bool:
        self._in.sleeps(READER_SLEEPS, True)
        if to_write:
            self._out.sleeps(WRITER_SLEEPS, True)
        moves = self._out.drained if self._lends else self._out.writable
        return self._gone is not None or self._in.readable or (to_write and moves)

    def disarm(self) -> None:
        self._in.sleeps(READER_SLEEPS, False)
        self._out.sleeps(WRITER_SLEEPS, False)
        try:
            while True:
                woken = self._waker.recv(64)
                if not woken:
                    self._gone = self._gone or "its process has ended"
                if len(woken) < 64:
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self._gone = self._gone or str(error)

    def fileno(self) -> int:
        return self._waker.fileno()

    def close(self) -> None:
        self._gone = "this link was closed"
        self.take_back()
        self._waker.close()
        self._out.close()
        self._in.close()
        # A view of the mapping may still be held by whoever reads the last window.
        with contextlib.suppress(BufferError):
            self._memory.close()


def offer(waker: socket.socket, capacity: int = CAPACITY) -> mmap.mmap:
    """Makes the memory of a link and hands it to the process at the other end."""
    size = 2 * (HEADER + capacity)
    descriptor = os.memfd_create("shoal-link", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        socket.send_fds(waker, [size.to_bytes(8, "little")], [descriptor])
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def take(waker: socket.socket) -> mmap.mmap:
    """Takes the memory that the other end offers."""
    message, descriptors, _, _ = socket.recv_fds(waker, 8, 1)
    if len(message) != 8 or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionError("the other process closed the connection instead of sharing its memory")
    try:
        size = int.from_bytes(message, "little")
        if os.fstat(descriptors[0]).st_size != size:
            raise ConnectionError(f"the other process announced {size} bytes of memory and shared another amount")
        return mmap.mmap(descriptors[0], size)
    finally:
        os.close(descriptors[0])
