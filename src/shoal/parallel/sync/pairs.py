"""Islands that exchange two at a time, each when it is ready: asynchronous gossip (AD-PSGD) and elastic averaging.

An island keeps its model separate from the parameters that it computes with. A step reads the model into the
parameters, computes, and adds the change to the model, whatever has happened to it meanwhile; then, if it is one that
asks, it exchanges the model with a partner. On islands that are asked a thread answers: it changes what is kept (the
model, or a centre) between two changes by the island itself. Both sides move by the same part of their difference, so
nothing is lost or added.

The order of all this is decided by timing, so each island can write a log of what was done to its model, which a proof
replays (`proof/replay.py`): rows of kind, island, clock, partner and the partner's clock, in their order here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shoal.comm.backend import ShoalGroup
from shoal.comm.ledger import BOOK
from shoal.comm.pairs import PackedMessage, answers, ask
from shoal.comm.point_to_point import PointToPoint
from shoal.comm.transport.link import PeerLost
from shoal.parallel.runnable import NotRunnable

if TYPE_CHECKING:
    from shoal.parallel.sync.outer import OuterLevel

Row = tuple[str, int, int, int, int]
NUMBERS = 2
"""Sent with a model: the island, and its clock."""
ASK_S = 1800.0
"""Longest wait for an answer."""


@dataclass(frozen=True)
class PairRule:
    """Who exchanges with whom under an asynchronous scheme, and how."""

    partner: Callable[[int], int | None]
    """The island that this one asks in a round; itself, if it keeps what is asked for; None where it asks none."""
    answers_with: str | None
    """What it keeps and answers with; None if it is never asked."""
    part: float
    """Of their difference, by which both sides move."""


class Pairs:
    """The asynchronous exchanges of one rank, which is an island of its own."""

    def __init__(self, level: OuterLevel, rule: PairRule) -> None:
        if not isinstance(level.islands.group, ShoalGroup | None):
            raise NotRunnable(f"{level.term} trains on the shoal backend only, which can answer at any time")
        self.level, self.rule = level, rule
        self.island = level.islands.index
        self.ranks = level.islands.ranks
        """Of all islands as the run began: their numbers stay when one is lost."""
        self.log: list[Row] | None = None
        """What was done to the model, where a proof asks for it."""
        self.lock = threading.Lock()
        self.answered = 0
        """Times that others asked since this was last read; their messages enter the ledger with this island's next."""
        self.asked = 0
        """Times that entered the ledger with the last step."""
        self._since_read = 0
        """Exchanges that changed the model since it was read."""
        self._answerer: _Answerer | None = None
        self._stop = self._stopping = False

    def _note(self, row: Row) -> None:
        if self.log is not None:
            self.log.append(row)

    @property
    def clock(self) -> int:
        """Updates that this island has made."""
        return int(self.level.kept.numbers["clock"])

    def step(self, *, stop: bool) -> bool:
        """After an update of the parameters: the change goes into the model, then an exchange, then the next read.
        Returns whether all islands stop here, which they agree on when they meet."""
        level, kept, tickets = self.level, self.level.kept, self.level.tickets
        self._stop |= stop
        clock = self.clock
        by_ticket = tickets is not None and not tickets.paused
        step, share = (tickets.step, tickets.share) if tickets is not None and by_ticket else (clock, self.island)
        if self._answerer is not None and self._answerer.error is not None:
            raise self._answerer.error
        with self.lock:
            for model, now, was in zip(kept["model"], level.masters, kept["read"], strict=True):
                model.add_(now - was)
            kept.numbers["clock"] = clock + 1
            self._note(("update", self.island, clock + 1, step, share))
            level.consistency.stale(self._since_read)
        self._answer_from_here_on()
        with BOOK.during("outer"):
            if (clock + 1) % level.term.period == 0:
                self._exchange((clock + 1) // level.term.period - 1)
                level.consistency.exchanged(level.spread)
            self.asked = self._book_answers()
        with self.lock:
            for model, now, was in zip(kept["model"], level.masters, kept["read"], strict=True):
                now.copy_(model)
                was.copy_(model)
            self._note(("read", self.island, clock + 1, -1, -1))
            self._since_read = 0
        level.count, level.steps = 0.0, 0
        return self._stopping

    def _exchange(self, round: int) -> None:
        partner, kept = self.rule.partner(round), self.level.kept
        if partner is None:
            return
        if partner == self.island:
            assert self.rule.answers_with is not None
            with self.lock:
                self._move(kept["model"], kept[self.rule.answers_with])
                self._note(("average", self.island, self.clock, self.island, self.clock))
            return
        group = self.level.islands.group
        if self.ranks[partner] not in self.level.islands.ranks:
            return  # It was lost.
        assert isinstance(group, ShoalGroup)
        place = self.level.islands.ranks.index(self.ranks[partner])
        question = PackedMessage(kept["model"], numbers=NUMBERS).fill([self.island, self.clock], kept["model"])
        reply = PackedMessage(kept["model"], numbers=NUMBERS)
        group._enter("recv", reply.vector.nbytes)
        group._enter("send", question.vector.nbytes)
        try:
            for task in ask(group.messages, place, question, reply):
                group.messages.wait(task, ASK_S)
        except PeerLost:
            if self.level.losses is None:
                raise
            return
        self._move(kept["model"], reply.tensors)
        theirs = int(reply.numbers[1])
        self._note(("average", self.island, self.clock, partner, theirs))
        self.level.consistency.looked(max(0, self.clock - theirs))

    def _move(self, mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
        """Both by the same part of their difference; `theirs` matters only where it is kept here, too."""
        for model, other in zip(mine, theirs, strict=True):
            force = self.rule.part * (model - other)
            model.sub_(force)
            other.add_(force)

    def answer(self, question: PackedMessage) -> PackedMessage:
        """What is kept here, as it was before the question moved it. Called by the thread that answers."""
        assert self.rule.answers_with is not None
        with self.lock, torch.no_grad():
            kept = self.level.kept[self.rule.answers_with]
            reply = PackedMessage(kept, numbers=NUMBERS).fill([self.island, self.clock], kept)
            self._move(question.tensors, kept)
            island, clock = (int(number) for number in question.numbers)
            self._note(("average", island, clock, self.island, self.clock))
            self.answered += 1
            self._since_read += self.rule.answers_with == "model"
        return reply

    def _book_answers(self) -> int:
        """Enters what was answered since the last step into the ledger; how often that was."""
        group, sizes = self.level.islands.group, self.level.kept["model"]
        with self.lock:
            answered, self.answered = self.answered, 0
        if answered and isinstance(group, ShoalGroup):
            size = PackedMessage(sizes, numbers=NUMBERS).vector.nbytes
            for kind in ("recv", "send"):
                for _ in range(answered):
                    group._enter(kind, size)
        return answered

    def _answer_from_here_on(self) -> None:
        if self.rule.answers_with is None or self._answerer is not None or self.level.islands.group is None:
            return
        group = self.level.islands.group
        assert isinstance(group, ShoalGroup)
        self._answerer = _Answerer(self, group.messages)

    def meet(self) -> None:
        """All islands are here: none asks any more, and each has its model in its parameters. Collective."""
        if self.level.total(float(self._stop)) > 0:
            self._stopping = True
        for now, model in zip(self.level.masters, self.level.kept["model"], strict=True):
            now.copy_(model)

    def close(self) -> None:
        """Ends the thread that answers. All islands must have met."""
        if self._answerer is not None:
            self._answerer.end()
            self._answerer = None


class _Answerer(threading.Thread):
    """Answers other islands, until it is ended."""

    def __init__(self, pairs: Pairs, messages: PointToPoint) -> None:
        super().__init__(name="shoal answers", daemon=True)
        self._pairs, self._messages = pairs, messages
        self._happened, self._ended = threading.Event(), False
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        question = PackedMessage(self._pairs.level.kept["model"], numbers=NUMBERS)
        tasks = answers(self._messages, question, lambda _, asked: self._pairs.answer(asked))
        while not self._ended:
            try:
                task = next(tasks)
            except BaseException as error:
                self.error = error  # The island raises it in its next step.
                return
            task.when_done(self._happened.set)
            while not (task.done or self._ended):
                self._happened.wait()
                self._happened.clear()

    def end(self) -> None:
        self._ended = True
        self._happened.set()
        self.join()
