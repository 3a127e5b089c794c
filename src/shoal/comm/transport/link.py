"""What every carrier offers: a stream of bytes to one peer and one from it. Nothing here blocks.

A stream is written and read in windows: `write` takes what there is room for, `window` shows what has arrived and
`consume` gives it back. A reduction adds straight from the window, so nothing is copied twice. Whoever finds
nothing to do may spin, or `arm` the link and sleep on its descriptor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)

ALIGN = 16
"""Messages begin at multiples of this many bytes of a stream, so that a window can be read as numbers of any type."""


class PeerLost(ConnectionError):
    """A peer has disconnected, or was given up on. Other links are unaffected."""

    def __init__(self, peer: int, why: str = "its process has ended or its connection broke") -> None:
        super().__init__(f"rank {peer} disconnected: {why}")
        self.peer = peer


class LinkAltered(PeerLost):
    """What arrived on a link is not what the peer has sent."""

    for_user = True

    def __init__(self, peer: int, block: int) -> None:
        ConnectionError.__init__(
            self,
            f"the connection to rank {peer} was altered on its way: block {block} of what arrived is not signed with "
            "this job's keys. Nothing of it was used, and the job ends; another process or device between the hosts "
            "changes, repeats or drops bytes.",
        )
        self.peer, self.block = peer, block


class Link(ABC):
    """Both directions between this rank and one peer."""

    peer: int
    polls_writing = False
    """Whether polling the descriptor shows when there is room to write."""

    @abstractmethod
    def write(self, data: Bytes) -> int:
        """Takes as many bytes as there is room for; returns how many."""

    def put(self, header: bytes, payload: Bytes) -> bool:
        """A complete message at once, padded; False if it has to be written piece by piece."""
        return False

    def lend(self, header: bytes, payload: Bytes) -> bool:
        """A zero-copy message: `header`, and where the peer may fetch `payload`; False if it has to be written.
        Nothing else may be written, and the payload must stay as it is, until it was `returned`."""
        return False

    def returned(self) -> bool:
        """Whether the peer has fetched the last zero-copy message."""
        return True

    def fetch(self, place: Bytes, start: int, into: Bytes) -> None:
        """Copies the payload of a zero-copy message: `place` is what followed its header."""
        raise ConnectionError(f"rank {self.peer} sent a reference to memory that {type(self).__name__} cannot read")

    def ask_to_lend(self) -> bool:
        """Asks the peer for zero-copy messages from now on; whether that is possible."""
        return False

    def take_back(self) -> bool:
        """Withdraws a zero-copy message whose payload will change, so that the peer does not use it; whether there was
        one."""
        return False

    @abstractmethod
    def window(self, most: int) -> Bytes:
        """Bytes that have arrived, in order, at most `most`; possibly none. Valid until consumed."""

    @abstractmethod
    def consume(self, count: int) -> None:
        """Gives back the first bytes of the window."""

    def read(self, into: Bytes) -> int:
        """Copies out what has arrived, as much as there is room for."""
        arrived = self.window(len(into))
        count = len(arrived)
        if count:
            into[:count] = arrived
            self.consume(count)
        return count

    @abstractmethod
    def arm(self, *, to_write: bool) -> bool:
        """Before sleeping: asks to be woken. True if there is something to do already."""

    @abstractmethod
    def disarm(self) -> None:
        """After sleeping. Raises PeerLost if that is what woke us."""

    def due(self) -> float | None:
        """When time alone may let something move, on the monotonic clock; None if time changes nothing."""
        return None

    @abstractmethod
    def fileno(self) -> int:
        """What to sleep on; -1 if there is nothing (in memory)."""

    @abstractmethod
    def close(self) -> None: ...
