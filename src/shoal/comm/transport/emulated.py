"""A link made slower: what is written is stamped with the time at which it would arrive, and is seen no sooner.

The sender reserves its host's wire: a chunk starts when the wire is free, occupies it for its bytes over the bandwidth,
and arrives a latency later. Ranks of one emulated host share the wire between hosts, so they slow each other down as on
a real one; between hosts bytes travel in frames, whose headers take their part of the bandwidth. Time is the clock that
all processes of a machine share.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Mapping, Sequence
from struct import Struct

import numpy as np

from shoal.comm.emulate import Emulation, Speed
from shoal.comm.transport.connect import host_name
from shoal.comm.transport.link import ALIGN, Bytes, Link

_CHUNK = Struct("<qd")
"""Bytes that follow, and when they arrive. As long as ALIGN."""
MOST_AT_ONCE = 1 << 16
"""Bytes in a chunk: a large message then shares the wire with others, as packets do."""
FRAME_BYTES, FRAME_HEADER_BYTES = 1448, 66
"""What a full Ethernet frame carries of a TCP stream, and the headers around it (Ethernet, IP, TCP, time stamps)."""
AHEAD_S = 1e-3
"""How far ahead of time a wire may be reserved, in addition to the latency: what its queue holds."""


class Wires:
    """For each emulated host, the time until which its wire is taken; in memory that all ranks see."""

    def __init__(self, memory: memoryview, lock: int) -> None:
        """`lock`: a descriptor of the same file in every process, on which the words are locked."""
        self._words = memory.cast("d")
        self._lock = lock

    def reserve(self, host: int, seconds: float, now: float, latest: float) -> float | None:
        """When the wire will have carried what takes so long; None if that would begin after `latest`."""
        fcntl.lockf(self._lock, fcntl.LOCK_EX, 8, 8 * host)
        try:
            start = max(now, self._words[host])
            if start > latest:
                return None
            self._words[host] = start + seconds
            return start + seconds
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN, 8, 8 * host)

    def free_at(self, host: int) -> float:
        return self._words[host]


class EmulatedLink(Link):
    """Around another link. `wire` is the host whose wire it leaves by; None where it has one of its own."""

    def __init__(self, link: Link, speed: Speed, wires: Wires, wire: int | None) -> None:
        self.peer, self.polls_writing = link.peer, link.polls_writing
        self._link, self._speed, self._wires, self._wire = link, speed, wires, wire
        self._own_free = 0.0
        self._again: float | None = None
        """When a wire that was too busy for a chunk may take it."""
        self._pending: Bytes = np.empty(0, dtype=np.uint8)
        """Of a chunk that the link below has not taken wholly."""
        self._taken = 0
        """Bytes of the stream in that chunk; they count as written when it has left."""
        self._header: Bytes = np.empty(ALIGN, dtype=np.uint8)
        self._header_at = 0
        self._left = self._pad = 0
        self._arrives = 0.0

    def write(self, data: Bytes) -> int:
        if not len(self._pending):
            count = min(len(data), MOST_AT_ONCE)
            arrives = self._reserve(count) if count else None
            if arrives is None:
                return 0
            chunk = np.zeros(ALIGN + count + -count % ALIGN, dtype=np.uint8)
            chunk[:ALIGN] = np.frombuffer(_CHUNK.pack(count, arrives), dtype=np.uint8)
            chunk[ALIGN : ALIGN + count] = data[:count]
            self._pending, self._taken = chunk, count
        self._pending = self._pending[self._link.write(self._pending) :]
        return 0 if len(self._pending) else self._taken

    def _reserve(self, count: int) -> float | None:
        """When `count` bytes arrive if they leave now; None if the wire is too busy for them."""
        now, ahead_s = time.monotonic(), self._speed.latency_s + AHEAD_S
        if self._wire is not None:
            framed = count + FRAME_HEADER_BYTES * -(-count // FRAME_BYTES)
            end = self._wires.reserve(self._wire, framed / self._speed.bytes_per_s, now, now + ahead_s)
        elif self._own_free > now + ahead_s:
            end = None
        else:
            end = self._own_free = max(now, self._own_free) + count / self._speed.bytes_per_s
        if end is None:
            self._again = (self._own_free if self._wire is None else self._wires.free_at(self._wire)) - ahead_s
            return None
        self._again = None
        return end + self._speed.latency_s

    def window(self, most: int) -> Bytes:
        while self._left == 0:
            if self._pad:
                skipped = len(self._link.window(self._pad))
                if not skipped:
                    return self._header[:0]
                self._link.consume(skipped)
                self._pad -= skipped
                continue
            got = self._link.read(self._header[self._header_at :])
            self._header_at += got
            if self._header_at < ALIGN:
                return self._header[:0]
            self._header_at = 0
            self._left, self._arrives = _CHUNK.unpack(self._header.tobytes())
            self._pad = -self._left % ALIGN
        if time.monotonic() < self._arrives:
            return self._header[:0]
        return self._link.window(min(most, self._left))

    def consume(self, count: int) -> None:
        self._link.consume(count)
        self._left -= count

    def due(self) -> float | None:
        times = ([self._arrives] if self._left else []) + ([] if self._again is None else [self._again])
        return min(times, default=None)

    def arm(self, *, to_write: bool) -> bool:
        if self._left:
            return time.monotonic() >= self._arrives
        # Waiting for the wire is waiting for a time: that the link below has room changes nothing.
        return self._link.arm(to_write=to_write and self._again is None)

    def disarm(self) -> None:
        self._link.disarm()

    def fileno(self) -> int:
        return self._link.fileno()

    def close(self) -> None:
        self._link.close()


class Emulator:
    """The links of a job as those of another cluster."""

    def __init__(self, emulation: Emulation, wires: Wires) -> None:
        self.emulation, self.wires = emulation, wires

    def around(self, links: Mapping[int, Link], ranks: Sequence[int], rank: int) -> dict[int, Link]:
        """The links of a rank (its number in the job) to the members of a group, by their place in it."""
        found: dict[int, Link] = {}
        for place, link in links.items():
            other = ranks[place]
            far = self.emulation.host_of(rank) != self.emulation.host_of(other)
            wire = self.emulation.host_of(rank) if far else None
            found[place] = EmulatedLink(link, self.emulation.speed(rank, other), self.wires, wire)
        return found

    def hosts(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The members of a group by emulated host, as places in the group."""
        hosts: dict[int, list[int]] = {}
        for place, rank in enumerate(ranks):
            hosts.setdefault(self.emulation.host_of(rank), []).append(place)
        return tuple(tuple(places) for places in hosts.values())


emulator: Emulator | None = None
"""What links of this process are made to be like, from now on."""


def emulate(chosen: Emulator | None) -> None:
    global emulator
    emulator = chosen


def host_of(rank: int) -> str:
    """What a rank of this job, in this process, calls its host: the emulated one where links are emulated."""
    return host_name() if emulator is None else f"emulated {emulator.emulation.host_of(rank)}"
