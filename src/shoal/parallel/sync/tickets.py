"""One island's tickets, where islands run at their own speed: which step and which share of it to compute next.

Between a ticket and the next the scheme may exchange (`Scheme.turn`): an island stands at the step of its ticket, and
passes a step where another one has computed its share of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shoal.comm.backend import ShoalGroup
from shoal.comm.ledger import BOOK
from shoal.comm.vector import Vector
from shoal.parallel.runnable import NotRunnable
from shoal.parallel.sync.office import ASK, DONE, FIELDS, INBOX, NOTHING_NOW, REPLY, WAIT, Office
from shoal.parallel.sync.quorum import Merging
from shoal.parallel.sync.shares import Shares

if TYPE_CHECKING:
    from shoal.parallel.sync.outer import OuterLevel

Row = tuple[str, int, int, int, int]
PHASE = "tickets"
"""In the ledger: which ticket comes when is decided by timing, so these messages are counted and not predicted."""
WAIT_S = 1e6


class IslandTickets:
    """What one island asks for and gets."""

    by_tickets = True

    def __init__(self, level: OuterLevel) -> None:
        if not isinstance(level.islands.group, ShoalGroup | None):
            raise NotRunnable(f"{level.term} trains on the shoal backend only, which can answer at any time")
        self.level = level
        self.ranks = level.islands.ranks
        """Of all islands as the run began: their numbers stay when one is lost."""
        self.island = level.islands.index
        self.shares = level.islands.size
        self.step, self.share = 0, self.island
        """The ticket that is computed now."""
        self.position = 0
        """The latest step that this island had a ticket of: a share that it takes from another may be older."""
        self.limit = 0
        self.stop = self.stopping = False
        """Whether this island was asked to stop; whether all end at the limit."""
        self.paused = True
        """Whether all work before the limit is done."""
        self.sending: list[Any] = []
        """Moves on their way to the first island."""
        self.moved: list[tuple[str, int]] = []
        """What was sent and taken since the last ticket, for the ledger."""
        self.log: list[Row] | None = None
        """What this island did, where a proof asks for it."""
        self.office: Office | None = None
        self._serving: Any = None
        self._begun = False
        self._life: Any = None

    def begin(self, step: int) -> None:
        """All islands stand at a step: the start, a checkpoint, or the last limit. Collective over islands."""
        group = self.level.islands.group
        if self.island == 0 and self.office is None:
            merging = Merging(self.level) if self.level.term.merges else None
            self.office = Office(Shares(self.shares, step), merging)
        if self.office is not None and self._serving is not group:
            numbers = [self.ranks.index(rank) for rank in self.level.islands.ranks]
            for island in set(range(self.shares)) - set(numbers):
                self.office.lose(island)
            if self.office.merging is not None:
                self.office.merging.members = self.office.shares.members
            self.office.serve(group, numbers)
        self._serving, self._begun = group, True
        self.step = self.position = step
        self.share = self.island
        self.level.term.start_turns(self.level, step)

    def note(self, row: Row) -> None:
        if self.log is not None:
            self.log.append(row)

    def ask(self, limit: int) -> None:
        """Asks for the next ticket before a limit."""
        self.limit, self.moved = limit, []
        self._take(wait=False)
        if self.share == NOTHING_NOW:
            self._take(wait=True)
        self.paused = self.share < 0
        if self.paused:
            self.settle()
        self._book_answers()

    def _take(self, *, wait: bool) -> None:
        """Takes a ticket. Where there is none left but those of others, this island stands at the limit: what it sends
        there may be what they wait for."""
        with BOOK.during(PHASE):
            self.step, self.share = self._ask(wait=wait)
        before, self.position = self.position, max(self.position, self.step)
        self.level.term.turn(self.level, before, self.position)

    def advance(self, *, stop: bool) -> None:
        """The ticket is computed and the parameters are updated."""
        self.stop |= stop
        self.note(("update", self.island, 0, self.step, self.share))
        self.ask(self.limit)

    def alone(self, clock: int) -> None:
        """Where the loop does not ask for tickets: this island has made the update of step `clock`, its own share."""
        if self.level.term.merges:
            if self._serving is not self.level.islands.group or not self._begun:
                self.begin(clock)
            self.moved = []
            self.note(("update", self.island, 0, clock, self.island))
            self.level.term.turn(self.level, clock, clock + 1)
            self._book_answers()

    def settle(self) -> None:
        """What this island sent is with the first one. All are asked to do so before they meet."""
        if self.sending:
            with BOOK.during(PHASE):
                self._ask(wait=True)  # The answer comes once no move is under way.
        self.sending = []

    def finish(self) -> None:
        """All islands have met: rounds that still wait for a lost one are merged. On all ranks alike."""
        if self.office is not None and self.office.merging is not None:
            with self.office.changed:
                self.office.merging.finish()

    def _book_answers(self) -> None:
        """Enters what the first island's thread received and sent into the ledger."""
        group, office = self.level.islands.group, self.office
        if office is None or not isinstance(group, ShoalGroup):
            return
        with office.changed:
            answered, office.answered = office.answered, []
        for what, fragment in answered:
            assert office.merging is not None
            size = office.merging.room(fragment).vector.nbytes
            with BOOK.during("outer"):
                group._enter("recv", 8 * FIELDS)
                group._enter("recv" if what == "received" else "send", size)
        self.moved += answered

    def _ask(self, *, wait: bool) -> tuple[int, int]:
        if self.office is not None:
            office = self.office
            found = office.ask(0, self.limit, stop=self.stop)
            found = office.wait(lambda: office.take(0)) if found is WAIT and wait else found
            self.stopping = office.shares.stopping
            return (office.shares.limit, NOTHING_NOW) if found is WAIT else found or (office.shares.limit, DONE)
        step, share, stopping, *_ = self.question(ASK, float(self.limit), float(self.stop), float(wait))
        self.stopping = bool(stopping)
        return int(step), int(share)

    def question(self, *numbers: float) -> list[float]:
        """Asks the first island, and waits for its answer."""
        group = self.level.islands.group
        assert isinstance(group, ShoalGroup)
        reply = torch.zeros(FIELDS, dtype=torch.float64)
        coming = group.messages.receive(0, REPLY, Vector(reply), background=False)
        self.tell(*numbers)
        group._enter("recv", reply.nbytes)
        group.messages.wait(coming, WAIT_S)
        return list(reply.tolist())

    def tell(self, *numbers: float) -> None:
        """Sends the first island a question."""
        group = self.level.islands.group
        assert isinstance(group, ShoalGroup)
        question = torch.tensor([*numbers, *[0.0] * (FIELDS - len(numbers))], dtype=torch.float64)
        group._enter("send", question.nbytes)
        group.messages.wait(group.messages.send(0, INBOX, Vector(question), background=False), WAIT_S)

    def report(self) -> dict[str, Any]:
        """What the first island counted: shares that another island computed, or that were handed out again after a
        loss; and of rounds how many moves each was merged of, and how many came too late."""
        if self.office is None:
            return {}
        shares, merging = self.office.shares, self.office.merging
        found: dict[str, Any] = {"taken_over": shares.taken_over, "repeated": shares.repeated}
        if merging is not None:
            found |= {"merged_of": dict(sorted(merging.merged.items())), "late": merging.late}
        return found

    def close(self) -> None:
        """Ends the thread, once all islands have met; a group that replaces the old one begins it anew."""
        if self.office is not None:
            self.office.close()
        self._serving = None
