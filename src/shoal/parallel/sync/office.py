"""The first island's office: it hands out shares of the data to islands that run at their own speed, and merges what
they send where a scheme has rounds with a quorum (`quorum.py`).

A thread of the first rank answers the other islands; the first island calls the office itself. A question is a short
vector of numbers. What cannot be answered yet waits here and not on the wire, so no island waits for another one's
messages. Every rank but the first has a receive posted that only ends when its process does: that is how the office
learns of a killed island, at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.comm.backend import ShoalGroup
from shoal.comm.pairs import PackedMessage
from shoal.comm.transport.link import PeerLost
from shoal.comm.vector import Vector
from shoal.parallel.sync.shares import WAIT, Shares
from shoal.strategy.terms.sync import QUESTION_NUMBERS

if TYPE_CHECKING:
    from shoal.parallel.sync.quorum import Merging

INBOX, REPLY, LIFE, PUSH, PULL = ((1 << 24) + number for number in (16, 17, 18, 1024, 4096))
"""Tags that nothing else in a group uses; PUSH and PULL: and as many more as there are fragments."""
FIELDS = QUESTION_NUMBERS
ASK, PUSHES, PULLS, BYE = 1.0, 2.0, 3.0, 4.0
DONE, NOTHING_NOW = -1, -2
"""In place of a share: all before the limit are computed, or others compute the last ones."""
LOOK_S, BUSY_S = 0.25, 0.005
"""How often the thread looks around, and how often where someone waits for time to pass."""


class Office:
    """The state, and what is asked of it; `changed` guards both."""

    def __init__(self, shares: Shares, merging: Merging | None) -> None:
        self.shares, self.merging = shares, merging
        self.changed = threading.Condition()
        self.answered: list[tuple[str, int]] = []
        """What the thread received and sent since this was last read: ("received" or "answered", fragment)."""
        self._thread: _Clerk | None = None

    def ask(self, island: int, limit: int, *, stop: bool) -> Any:
        """A share of the data, None or WAIT, for an island that has computed the one before."""
        with self.changed:
            self.computed(island, limit, stop=stop)
            self.changed.notify_all()
            return self.take(island)

    def computed(self, island: int, limit: int, *, stop: bool) -> None:
        """An island asks for the next share."""
        self.shares.done(island, time.monotonic())
        self.shares.until(limit, stop=stop)
        if self.merging is not None:
            self.merging.share_s = self.shares.share_s

    def take(self, island: int) -> Any:
        """As long as moves are under way no island is told that all is done: they would be left out of a checkpoint."""
        found = self.shares.take(island, time.monotonic())
        return WAIT if found is None and self._thread is not None and self._thread.receiving else found

    def lose(self, island: int) -> None:
        with self.changed:
            self.shares.lose(island)
            self.changed.notify_all()

    def serve(self, group: Any, islands: Sequence[int]) -> None:
        """Answers the other ranks of a group from here on; `islands`: their numbers."""
        if group is not None:
            assert isinstance(group, ShoalGroup)
            self._thread = _Clerk(self, group, islands)

    def wait(self, ready: Any) -> Any:
        """Waits until `ready()` gives something; for the first island itself."""
        with self.changed:
            while (found := ready()) is WAIT:
                self.check()
                self.changed.wait(BUSY_S)
            return found

    def check(self) -> None:
        if self._thread is not None and self._thread.error is not None:
            raise RuntimeError("the thread that answers other islands has failed") from self._thread.error

    def close(self) -> None:
        if self._thread is not None:
            self._thread.end()
            self._thread = None


class _Clerk(threading.Thread):
    """Answers other islands until it is ended."""

    def __init__(self, office: Office, group: ShoalGroup, islands: Sequence[int]) -> None:
        super().__init__(name="shoal office", daemon=True)
        self._office, self._messages = office, group.messages
        self._islands, self._ended = list(islands), False
        self.error: BaseException | None = None
        self.receiving: list[tuple[Any, int, int, PackedMessage]] = []
        """Moves under way: the receive, the island, the fragment, and where they arrive."""
        self._waiting: list[tuple[int, list[float]]] = []
        """Questions that cannot be answered yet: the place in the group, and the question."""
        self._sending: list[Any] = []
        nothing = Vector(torch.zeros(1))
        self._lives = {
            place: self._messages.receive(place, LIFE, nothing, background=True)
            for place in range(len(self._islands))
            if place
        }
        self._post()
        self.start()

    def _post(self) -> None:
        self._into = torch.zeros(FIELDS, dtype=torch.float64)
        self._inbox: Any = self._messages.receive(-1, INBOX, Vector(self._into), background=True)

    def run(self) -> None:
        try:
            with torch.no_grad():
                while not self._ended:
                    self._turn()
        except BaseException as error:
            self.error = error

    def _turn(self) -> None:
        tasks = [self._inbox, *self._lives.values(), *(task for task, *_ in self.receiving)]
        self._messages.wait_any(tasks, BUSY_S if self._waiting else LOOK_S)
        for place in [place for place, life in self._lives.items() if life.done]:
            del self._lives[place]
            self._waiting = [each for each in self._waiting if each[0] != place]
            self._office.lose(self._islands[place])
        if self._inbox.done:
            if self._inbox.error is not None:
                raise self._inbox.error
            question, source = self._into.tolist(), self._inbox.source
            self._post()
            self._take(source, question)
        office = self._office
        for each in [each for each in self.receiving if each[0].done]:
            self.receiving.remove(each)
            task, island, fragment, message = each
            if task.error is None and office.merging is not None:
                with office.changed:
                    office.merging.push(island, fragment, message.numbers.tolist(), message.tensors)
                    office.answered.append(("received", fragment))
                    office.changed.notify_all()
        self._waiting = [each for each in self._waiting if not self._answers(*each)]
        self._sending = [task for task in self._sending if not task.done]

    def _take(self, place: int, question: list[float]) -> None:
        kind, fragment = question[0], int(question[1])
        office = self._office
        if kind == PUSHES:
            assert office.merging is not None
            message = office.merging.room(fragment)
            task = self._messages.receive(place, PUSH + fragment, message.vector, background=True)
            self.receiving.append((task, self._islands[place], fragment, message))
            return
        if kind == ASK:
            with office.changed:
                office.computed(self._islands[place], int(question[1]), stop=bool(question[2]))
        if kind != BYE:
            self._waiting.append((place, question))

    def _answers(self, place: int, question: list[float]) -> bool:
        """Answers a question, if that is possible now."""
        office, island = self._office, self._islands[place]
        with office.changed:
            if question[0] == ASK:
                found = office.take(island)
                if found is WAIT and question[3]:
                    return False
                none = NOTHING_NOW if found is WAIT else DONE
                step, share = (office.shares.limit, none) if found in (WAIT, None) else found
                self._send(place, REPLY, [float(step), float(share), float(office.shares.stopping)])
                return True
            fragment = int(question[1])
            assert office.merging is not None
            if any(who == island and which == fragment for _, who, which, _ in self.receiving):
                return False
            message = office.merging.pull(fragment, int(question[2]))
            if message is None:
                return False
            office.answered.append(("answered", fragment))
        self._sending.append(self._messages.send(place, PULL + fragment, message.vector, background=True))
        return True

    def _send(self, place: int, tag: int, numbers: list[float]) -> None:
        answer = torch.tensor(numbers + [0.0] * (FIELDS - len(numbers)), dtype=torch.float64)
        self._sending.append(self._messages.send(place, tag, Vector(answer), background=True))

    def end(self) -> None:
        self._ended = True
        try:
            bye = torch.tensor([BYE, *[0.0] * (FIELDS - 1)], dtype=torch.float64)
            self._messages.send(0, INBOX, Vector(bye), background=True)
        except (PeerLost, RuntimeError):
            pass  # The group is broken or closed: the thread finds out by itself.
        self.join()
