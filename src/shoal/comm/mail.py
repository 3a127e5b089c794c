"""Messages from one rank to another, matched by tag: send, receive, and receive from anyone.

They have links of their own beside the collectives', and are not in one line with each other: a receive may wait while
others pass it. What arrives before it is asked for is kept until it is. A peer that is lost fails the messages to and
from it, and no others.
"""

from __future__ import annotations

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
    """A message does not fit the tensor it was to be received into."""


def _no_steps() -> Steps:
    yield from ()


class Outgoing(Task):
    """A message on its way to a peer."""

    def __init__(self, peer: int, send: Send, data: Vector) -> None:
        super().__init__(_no_steps(), f"a message to rank {peer}")
        self.peer, self.send = peer, send
        self.data = data
        """Held until it has left: the caller may let go of a copy that was made for this message alone."""


class Wanted(Task):
    """A message that was asked for."""

    def __init__(self, peer: int, tag: int, into: Vector) -> None:
        super().__init__(_no_steps(), f"a message from {'anyone' if peer == ANY else f'rank {peer}'} with tag {tag}")
        self.peer, self.tag, self.into = peer, tag, into
        self.source = peer
        """Who sent it, in the end."""
        self.taken = False
        """Whether a message for it is on its way in."""


class Mail(TaskQueue):
    """The messages between this rank and its peers."""

    def __init__(self, links: Mapping[int, Link], name: str) -> None:
        super().__init__(links.values(), name)
        self._boxes = {peer: _Box(link, self) for peer, link in links.items()}
        self._gone: dict[int, PeerLost] = {}

    def send(self, to: int, tag: int, data: Vector, *, background: bool) -> Outgoing:
        link = self._boxes[to].link
        letter = Outgoing(to, Send(link, _HEADER.pack(tag, data.nbytes), data.bytes), data)
        if to in self._gone:
            letter.finish(self._gone[to])
        else:
            self._boxes[to].outgoing.append(letter)
            self.submit(letter, background=background)
        return letter

    def receive(self, source: int, tag: int, into: Vector, *, background: bool) -> Wanted:
        """`source` may be ANY."""
        letter = Wanted(source, tag, into)
        if source in self._gone:
            letter.finish(self._gone[source])
        else:
            self.submit(letter, background=background)
        return letter

    def give_up(self, peer: int) -> None:
        """No more is expected of this peer; what was fails now. Everything else goes on."""
        with self._driver:
            self._lose(PeerLost(peer, "it was given up on"))

    def hang_up(self) -> None:
        for box in self._boxes.values():
            box.link.close()

    def wanted(self, peer: int, tag: int) -> Wanted | None:
        """The first that waits for such a message."""
        for task in self._tasks:
            if isinstance(task, Wanted) and task.tag == tag and task.peer in (peer, ANY) and not task.taken:
                return task
        return None

    def _advance(self) -> Sequence[Waits]:
        waiting: list[Waits] = []
        moved = True
        while moved and self._tasks:
            moved, waiting = False, []
            for peer, box in self._boxes.items():
                if peer in self._gone:
                    continue
                try:
                    moved |= self._hand_over(box) | self._post(box) | box.read()
                except PeerLost as lost:
                    self._lose(lost)
                    moved = True
                else:
                    waiting += [box, *(letter.send for letter in list(box.outgoing)[:1])]
        return waiting if self._tasks else ()

    def _post(self, box: _Box) -> bool:
        moved = False
        while box.outgoing:
            letter = box.outgoing[0]
            moved |= letter.send.advance()
            if not letter.send.done:
                break
            box.outgoing.popleft()
            self.end(letter)
        return moved

    def _hand_over(self, box: _Box) -> bool:
        """What was kept goes to those who have asked for it since."""
        handed = False
        for at in range(len(box.kept) - 1, -1, -1) if box.kept else ():
            tag, _ = box.kept[at]
            if all(earlier != tag for earlier, _ in list(box.kept)[:at]) and (letter := self.wanted(box.peer, tag)):
                self._deliver(letter, box.peer, box.kept[at][1])
                del box.kept[at]
                handed = True
        return handed

    def _deliver(self, letter: Wanted, peer: int, payload: Bytes) -> None:
        letter.source = peer
        if len(payload) != letter.into.nbytes:
            self.end(letter, wrong_size(peer, letter, len(payload)))
        else:
            letter.into.bytes[:] = payload
            self.end(letter)

    def _give_up_on(self, task: Task, error: BaseException) -> None:
        self.end(task, error)

    def end(self, letter: Task, error: BaseException | None = None) -> None:
        if letter in self._tasks:
            self._tasks.remove(letter)
        letter.finish(error)

    def _lose(self, lost: PeerLost) -> None:
        self._gone[lost.peer] = lost
        self._boxes[lost.peer].outgoing.clear()
        for task in list(self._tasks):
            if isinstance(task, Outgoing | Wanted) and task.peer == lost.peer:
                self.end(task, lost)


def wrong_size(peer: int, letter: Wanted, size: int) -> WrongSize:
    return WrongSize(f"rank {peer} sent {size} bytes with tag {letter.tag}, into a tensor of {letter.into.nbytes}")


class _Box:
    """What goes to one peer, and what comes from it."""

    def __init__(self, link: Link, mail: Mail) -> None:
        self.link, self.peer = link, link.peer
        self.outgoing: deque[Outgoing] = deque()
        self.kept: deque[tuple[int, Bytes]] = deque()
        """Messages that nobody had asked for, oldest first."""
        self._mail = mail
        self._header = np.empty(ALIGN, dtype=np.uint8)
        self._at = -ALIGN
        """Bytes of the payload that are in place; below zero, bytes of the header that are missing."""
        self._tag = self._size = 0
        self._place: Bytes = self._header
        self._letter: Wanted | None = None

    def read(self) -> bool:
        """Takes in what has arrived."""
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
        letter = self._mail.wanted(self.peer, self._tag)
        if letter is not None and any(tag == self._tag for tag, _ in self.kept):
            letter = None  # Those that came before have to be asked for before.
        fits = letter is not None and letter.into.nbytes == self._size
        self._place = letter.into.bytes if letter is not None and fits else np.empty(self._size, dtype=np.uint8)
        if letter is not None:
            letter.taken = True
        self._letter = letter

    def _close(self) -> None:
        if self._letter is None:
            self.kept.append((self._tag, self._place))
        else:
            self._letter.source = self.peer
            fits = self._letter.into.nbytes == self._size
            self._mail.end(self._letter, None if fits else wrong_size(self.peer, self._letter, self._size))
        self._letter, self._place, self._at = None, self._header, -ALIGN
