"""All handshakes of one rank, side by side: the calls it makes, and those it answers.

Strangers may connect to a port. Those that send nothing have their connections closed after a few seconds, and sooner
where many are open; a rank whose connection was closed among theirs calls again. So silence delays no rank.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.comm.transport.handshake import Recognised, Steps, Stranger, answer, call
from shoal.comm.transport.link import Link
from shoal.comm.transport.shared import SharedLink, offer, take
from shoal.common.log import logger

UNRECOGNISED = 64
"""Connections that may be open at a time before their callers have been recognised."""
SILENT_S = 5.0
"""How long a caller may take to prove itself."""
AT_LEAST_S = 0.25
"""How long it has in any case, however many others call."""
LOOK_S = 0.25
"""How often silent connections are looked for."""
AGAIN_S = 0.05
"""Before a call that was cut off is made again."""
GIVE_UP_S = 60.0
"""How long calls that are cut off are made again."""

MakeLink = Callable[[socket.socket, Recognised], Link]
Peer = tuple[int, int]
"""A rank and one of the pair's links."""


class CannotConnect(ConnectionError):
    """The links of a group could not be made."""


@dataclass(slots=True)
class _Talk:
    """One handshake under way."""

    connection: socket.socket
    steps: Steps
    since: float
    to: Peer | None = None
    """The peer that this rank has called; None for a caller."""


class Meeting:
    """The handshakes of one rank of a group."""

    def __init__(self, rank: int, secret: bytes, listeners: Sequence[socket.socket], make_link: MakeLink) -> None:
        self.rank, self.secret, self._make_link = rank, secret, make_link
        self.links: dict[Peer, Link] = {}
        self._selector = selectors.DefaultSelector()
        self._talks: dict[socket.socket, _Talk] = {}
        self._listeners = list(listeners)
        for listener in listeners:
            listener.setblocking(False)
        self._again: list[tuple[float, Peer]] = []
        self._refused: list[str] = []
        """Why callers were turned away."""
        self._cut_off_since: dict[Peer, float] = {}
        self._meanwhile: Callable[[], object] = lambda: None

    def while_waiting(self, call: Callable[[], object]) -> None:
        """Called a few times a second until all are there."""
        self._meanwhile = call

    def run(self, calls: dict[Peer, Any], expected: set[Peer], deadline: float) -> dict[Peer, Link]:
        """`calls`: where each peer that is to be called listens; `expected`: the peers that call this rank."""
        try:
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ)
            self._again = [(0.0, peer) for peer in calls]
            look_at = time.monotonic() + LOOK_S
            while missing := (calls.keys() | expected) - self.links.keys():
                now = time.monotonic()
                if now > deadline:
                    names = ", ".join(str(other) for other in sorted({other for other, _ in missing}))
                    raise CannotConnect(f"rank {self.rank}: rank {names} did not connect in time")
                for at, peer in list(self._again):
                    if at <= now:
                        self._again.remove((at, peer))
                        self._call(peer, calls[peer])
                for key, _ in self._selector.select(AGAIN_S):
                    if key.fileobj in self._listeners:
                        self._accept(key.fileobj, expected)  # type: ignore[arg-type]
                    elif key.fileobj in self._talks:
                        self._go_on(self._talks[key.fileobj], expected)  # type: ignore[index]
                if now > look_at:
                    look_at = now + LOOK_S
                    self._close_silent(SILENT_S)
                    self._meanwhile()
            return self.links
        except BaseException:
            for link in self.links.values():
                link.close()
            raise
        finally:
            for talk in list(self._talks.values()):
                self._turn_away(talk, "it did not prove that it holds this job's token")
            self._selector.close()
            if self._refused:
                times = len(self._refused)
                logger.warning(
                    "rank %d refused %d connection%s to its port: %s",
                    self.rank,
                    times,
                    "s" if times > 1 else "",
                    self._refused[0],
                )

    def _call(self, peer: Peer, where: Any) -> None:
        near = isinstance(where, str)
        family = socket.AF_UNIX if near else socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        talk = _Talk(connection, self._calling(connection, where, peer), time.monotonic(), peer)
        self._talks[connection] = talk
        self._go_on(talk, set())

    def _calling(self, connection: socket.socket, where: Any, peer: Peer) -> Steps:
        other, channel = peer
        try:
            connection.connect(where)
        except BlockingIOError as error:
            if connection.family == socket.AF_UNIX:
                raise ConnectionError("its queue of callers is full") from error
            yield selectors.EVENT_WRITE
            number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                raise self._unreachable(peer, where, OSError(number, os.strerror(number))) from None
        except OSError as error:
            raise self._unreachable(peer, where, error) from error
        known = yield from call(connection, self.secret, rank=self.rank, other=other, channel=channel)
        if connection.family == socket.AF_UNIX:
            while True:
                try:
                    self.links[peer] = SharedLink(other, connection, take(connection), first=False)
                    return known
                except BlockingIOError:
                    yield selectors.EVENT_READ
        self.links[peer] = self._make_link(connection, known)
        return known

    def _accept(self, listener: socket.socket, expected: set[Peer]) -> None:
        for _ in range(16):
            if sum(talk.to is None for talk in self._talks.values()) >= UNRECOGNISED:
                self._close_silent(AT_LEAST_S)
                if sum(talk.to is None for talk in self._talks.values()) >= UNRECOGNISED:
                    time.sleep(0.001)  # The listener stays readable: leave it for a moment.
                    return
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # No caller is left, or one disconnected.
            connection.setblocking(False)
            talk = _Talk(connection, self._answering(connection, expected), time.monotonic())
            self._talks[connection] = talk
            self._go_on(talk, expected)

    def _answering(self, connection: socket.socket, expected: set[Peer]) -> Steps:
        known = yield from answer(connection, self.secret, rank=self.rank)
        peer = (known.rank, known.channel)
        if peer not in expected or peer in self.links:
            raise Stranger("it is not a rank that is to call")
        if connection.family == socket.AF_UNIX:
            self.links[peer] = SharedLink(known.rank, connection, offer(connection), first=True)
        else:
            self.links[peer] = self._make_link(connection, known)
        return known

    def _go_on(self, talk: _Talk, expected: set[Peer]) -> None:
        """Moves a handshake along; ends it where it is over."""
        connection = talk.connection
        try:
            event = next(talk.steps)
        except StopIteration:
            self._forget(connection)
        except CannotConnect:
            raise
        except OSError as error:
            self._turn_away(talk, str(error))
            if talk.to is not None:
                self._call_again(talk.to, error)
        else:
            known = connection in self._selector.get_map()
            (self._selector.modify if known else self._selector.register)(connection, event)

    def _call_again(self, peer: Peer, error: OSError) -> None:
        now = time.monotonic()
        since = self._cut_off_since.setdefault(peer, now)
        if isinstance(error, Stranger) or now - since > GIVE_UP_S:
            raise CannotConnect(f"rank {self.rank} called rank {peer[0]}, and what answered is not it: {error}")
        self._again.append((now + AGAIN_S, peer))

    def _unreachable(self, peer: Peer, where: Any, error: OSError) -> CannotConnect:
        return CannotConnect(f"rank {self.rank} could not reach rank {peer[0]} at {where!r}: {error}")

    def _close_silent(self, seconds: float) -> None:
        """Closes connections of callers that have not proved themselves for so long."""
        latest = time.monotonic() - seconds
        for talk in [talk for talk in self._talks.values() if talk.to is None and talk.since < latest]:
            self._turn_away(talk, "it said nothing for too long")

    def _forget(self, connection: socket.socket) -> None:
        del self._talks[connection]
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)

    def _turn_away(self, talk: _Talk, why: str) -> None:
        """Ends a handshake; a caller's is noted."""
        if talk.to is None:
            self._refused.append(why)
        self._end(talk)

    def _end(self, talk: _Talk) -> None:
        self._forget(talk.connection)
        talk.steps.close()
        talk.connection.close()
