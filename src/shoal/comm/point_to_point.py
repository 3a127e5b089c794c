"""Point-to-point messages, matched by tag: send, receive, and receive from any rank.

They have their own links, separate from the collectives', and are not ordered among each other: a receive may wait
while later ones complete. A message that arrives before its receive is posted is buffered. A lost peer fails
the messages to and from it, and no others. A rank may send to itself: two of its threads may talk.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from struct import Struct

import numpy as np

from shoal.comm.peers import Steps, Waits
from shoal.comm.progress import Task, TaskQueue
from shoal.comm.transfer import Send
from shoal.comm.transport.link import ALIGN, Bytes, Link, PeerLost
from shoal.comm.vector import Vector

_HEADER = Struct("<qQ")
"""Tag, and bytes that follow. As long as ALIGN."""
ANY = -1


class WrongSize(ValueError):
    """A message does not fit the tensor it is received into."""


def _no_steps() -> Steps:
    yield from ()


class PostedSend(Task):
    """An outgoing message."""

    def __init__(self, peer: int, send: Send | None, data: Vector) -> None:
        super().__init__(_no_steps(), f"a message to rank {peer}")
        self.peer, self.send = peer, send
        """`send` is None for a message to this rank itself."""
        self.data = data
        """Kept alive until it is sent: it may be a copy that was made for this message only."""


class PostedReceive(Task):
    """A receive that was posted."""

    def __init__(self, peer: int, tag: int, into: Vector) -> None:
        super().__init__(_no_steps(), f"a message from {'any rank' if peer == ANY else f'rank {peer}'} with tag {tag}")
        self.peer, self.tag, self.into = peer, tag, into
        self.source = peer
        """The rank that sent it, once it is received."""
        self.taken = False
        """Whether a message for it is being received."""


class PointToPoint(TaskQueue):
    """The point-to-point messages between this rank and its peers."""

    def __init__(self, links: Mapping[int, Link], name: str, *, rank: int = ANY) -> None:
        """`rank`: this rank, if it may send to itself."""
        super().__init__(links.values(), name)
        self._rank = rank
        self._own: deque[tuple[int, PostedSend | Bytes]] = deque()
        """Messages to itself, oldest first: the tag, and the message, or its bytes once it is buffered."""
        self._peers = {peer: _PeerQueue(link, self) for peer, link in links.items()}
        self._lost: dict[int, PeerLost] = {}

    def send(self, to: int, tag: int, data: Vector, *, background: bool) -> PostedSend:
        if to == self._rank:
            own = PostedSend(to, None, data)
            self._own.append((tag, own))
            self.submit(own, background=background)
            return own
        link = self._peers[to].link
        message = PostedSend(to, Send(link, _HEADER.pack(tag, data.nbytes), data.bytes), data)
        if to in self._lost:
            message.finish(self._lost[to])
        else:
            self._peers[to].outgoing.append(message)
            self.submit(message, background=background)
            self._end_if_lost(message)
        return message

    def receive(self, source: int, tag: int, into: Vector, *, background: bool) -> PostedReceive:
        """`source` may be ANY."""
        message = PostedReceive(source, tag, into)
        if source in self._lost:
            message.finish(self._lost[source])
        else:
            self.submit(message, background=background)
            self._end_if_lost(message)
        return message

    def _end_if_lost(self, message: PostedSend | PostedReceive) -> None:
        """Another thread may have found that the peer is lost while the message was posted."""
        if message.peer in self._lost and not message.done:
            with contextlib.suppress(ValueError):  # Or has just ended it.
                self._tasks.remove(message)
            message.finish(self._lost[message.peer])

    def give_up(self, peer: int) -> None:
        """Fails all messages to and from a peer, now and later. Other messages continue."""
        with self._driver:
            self._lose(PeerLost(peer, "it was given up on"))

    def hang_up(self) -> None:
        for queue in self._peers.values():
            queue.link.close()

    def wanted(self, peer: int, tag: int) -> PostedReceive | None:
        """The first posted receive that matches such a message."""
        for task in tuple(self._tasks):  # Other threads post messages meanwhile.
            if isinstance(task, PostedReceive) and task.tag == tag and task.peer in (peer, ANY) and not task.taken:
                return task
        return None

    def _advance(self) -> Sequence[Waits]:
        waiting: list[Waits] = []
        moved = True
        while moved and self._tasks:
            moved, waiting = self._deliver_own(), []
            for peer, queue in self._peers.items():
                if peer in self._lost:
                    continue
                try:
                    moved |= self._match_unexpected(queue) | self._send_outgoing(queue) | queue.read()
                except PeerLost as lost:
                    self._lose(lost)
                    moved = True
                else:
                    waiting += [queue, *(m.send for m in list(queue.outgoing)[:1] if m.send is not None)]
        return waiting if self._tasks else ()

    def _send_outgoing(self, queue: _PeerQueue) -> bool:
        moved = False
        while queue.outgoing:
            message = queue.outgoing[0]
            assert message.send is not None
            moved |= message.send.advance()
            if not message.send.done:
                break
            queue.outgoing.popleft()
            self.end(message)
        return moved

    def _deliver_own(self) -> bool:
        """Delivers or buffers what this rank has sent to itself: its sends never wait for a receive."""
        delivered, waiting = False, deque[tuple[int, "PostedSend | Bytes"]]()
        while self._own:
            tag, held = self._own.popleft()
            payload = held.data.bytes if isinstance(held, PostedSend) else held
            first = all(earlier != tag for earlier, _ in waiting)
            message = self.wanted(self._rank, tag) if first else None
            if message is not None:
                self._deliver(message, self._rank, payload)
                delivered = True
            else:
                waiting.append((tag, payload.copy() if isinstance(held, PostedSend) else payload))
            if isinstance(held, PostedSend):
                self.end(held)
        self._own.extendleft(reversed(waiting))
        return delivered

    def _match_unexpected(self, queue: _PeerQueue) -> bool:
        """Delivers buffered messages to receives that were posted since."""
        matched = False
        for at in range(len(queue.unexpected) - 1, -1, -1) if queue.unexpected else ():
            tag, _ = queue.unexpected[at]
            first = all(earlier != tag for earlier, _ in list(queue.unexpected)[:at])
            if first and (message := self.wanted(queue.peer, tag)):
                self._deliver(message, queue.peer, queue.unexpected[at][1])
                del queue.unexpected[at]
                matched = True
        return matched

    def _deliver(self, message: PostedReceive, peer: int, payload: Bytes) -> None:
        message.source = peer
        if len(payload) != message.into.nbytes:
            self.end(message, wrong_size(peer, message, len(payload)))
        else:
            message.into.bytes[:] = payload
            self.end(message)

    def _give_up_on(self, task: Task, error: BaseException) -> None:
        self.end(task, error)

    def end(self, message: Task, error: BaseException | None = None) -> None:
        if message in self._tasks:
            self._tasks.remove(message)
        message.finish(error)

    def _lose(self, lost: PeerLost) -> None:
        self._lost[lost.peer] = lost
        queue = self._peers[lost.peer]
        queue.outgoing.clear()
        queue.break_off()
        # No longer listened to: that it is disconnected must not be taken for the cause of other waits.
        self._links = [link for link in self._links if link is not queue.link]
        queue.link.take_back()
        for task in list(self._tasks):
            if isinstance(task, PostedSend | PostedReceive) and task.peer == lost.peer:
                self.end(task, lost)


def wrong_size(peer: int, message: PostedReceive, size: int) -> WrongSize:
    return WrongSize(f"rank {peer} sent {size} bytes with tag {message.tag}, into a tensor of {message.into.nbytes}")


class _PeerQueue:
    """The messages to and from one peer."""

    def __init__(self, link: Link, owner: PointToPoint) -> None:
        self.link, self.peer = link, link.peer
        self.outgoing: deque[PostedSend] = deque()
        self.unexpected: deque[tuple[int, Bytes]] = deque()
        """Messages without a posted receive, oldest first."""
        self._owner = owner
        self._header = np.empty(ALIGN, dtype=np.uint8)
        self._at = -ALIGN
        """Bytes of the payload received so far; below zero, bytes of the header still missing."""
        self._tag = self._size = 0
        self._place: Bytes = self._header
        self._message: PostedReceive | None = None

    def break_off(self) -> None:
        """The peer is lost: a receive from any rank that its message was for waits for another one."""
        if self._message is not None and self._message.peer == ANY:
            self._message.taken = False

    def read(self) -> bool:
        """Reads what has arrived."""
        moved = False
        while True:
            if self._at < 0:
                took = self.link.read(self._header[ALIGN + self._at :])
                self._at += took
                if self._at == 0:
                    self._open()
            elif self._at < self._size:
                took = self.link.read(self._place[self._at : self._size])
                self._at += took
            else:
                took = len(self.link.window(self._size + -self._size % ALIGN - self._at))
                if took:
                    self.link.consume(took)
                    self._at += took
            if self._at >= 0 and self._at == self._size + -self._size % ALIGN:
                self._close()
                took = 1
            if not took:
                return moved
            moved = True

    def _open(self) -> None:
        self._tag, self._size = _HEADER.unpack(self._header.tobytes())
        message = self._owner.wanted(self.peer, self._tag)
        if message is not None and any(tag == self._tag for tag, _ in self.unexpected):
            message = None  # Earlier messages with this tag must be matched first.
        fits = message is not None and message.into.nbytes == self._size
        self._place = message.into.bytes if message is not None and fits else np.empty(self._size, dtype=np.uint8)
        if message is not None:
            message.taken = True
        self._message = message

    def _close(self) -> None:
        if self._message is None:
            self.unexpected.append((self._tag, self._place))
        else:
            self._message.source = self.peer
            fits = self._message.into.nbytes == self._size
            self._owner.end(self._message, None if fits else wrong_size(self.peer, self._message, self._size))
        self._message, self._place, self._at = None, self._header, -ALIGN
