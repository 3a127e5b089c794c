"""The order of all updates and reads, decided in one place: by the first server.

Pure bookkeeping: it is handed what workers send and yields what to do. The rule of the level (`strategy/terms/sync.py`)
decides which gradients make an update and who may read. All shards follow the same order, so a read is one version
of the full model, and the log of updates is enough to repeat a run in one process (`proof/replay_updates.py`).

Workers stop at a *limit*, a step at which all of them evaluate, save or end: no ticket beyond it is handed out, and who
asks for one is answered once all gradients before it are in the model.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.strategy.terms.serving import Clocks, Push
from shoal.strategy.terms.sync import Served

Ticket = tuple[int, int]
"""(step, share)"""

PATIENCE = 10.0
"""A worker that takes this many times the median to compute a ticket is released: the others no longer wait for it."""
SHORTEST_S = 5.0
"""But never earlier: the first steps of a process are slow."""


class Update(NamedTuple):
    """One optimiser step, of the mean of these gradients."""

    pushes: Sequence[Push]
    lr_factor: float
    staleness: float
    """The mean of theirs."""


class Dropped(NamedTuple):
    """A gradient that came too late."""

    push: Push


class Answer(NamedTuple):
    """A worker reads the present version and computes a ticket; without one, all work before the limit is done."""

    worker: int
    ticket: Ticket | None
    step: int
    """Where the worker stands: the step of its ticket, or the limit."""
    stop: bool


Action = Update | Dropped | Answer


@dataclass
class Coordinator:
    """The state of one run."""

    rule: Served
    workers: int
    clocks: Clocks = field(init=False)
    waiting: list[Push] = field(default_factory=list)
    asking: set[int] = field(default_factory=set)
    outstanding: dict[int, Ticket] = field(default_factory=dict)
    """Tickets that workers compute now."""
    returned: deque[Ticket] = field(default_factory=deque)
    """Tickets of workers that were lost."""
    limit: int = 1 << 60
    stopping: bool = False
    log: list[list[list[int]]] = field(default_factory=list)
    """For each update its gradients, as (worker, step, share, version read, number of the worker's push)."""
    dropped_log: list[list[int]] = field(default_factory=list)
    """Likewise those that were dropped."""
    staleness: Counter[int] = field(default_factory=Counter)
    apart: Counter[int] = field(default_factory=Counter)
    """At each read: how many steps the reader is ahead of the slowest worker."""
    dropped: int = 0
    repeated: int = 0
    """Tickets that were handed out a second time."""
    _next: int = 0
    """The next ticket, where they are handed out in the order of the data."""
    _highest: int = -1
    _since: dict[int, float] = field(default_factory=dict)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def __post_init__(self) -> None:
        self.begin(0)

    def begin(self, step: int) -> None:
        """All workers stand at a step: the start, or a checkpoint."""
        everyone = range(self.workers)
        self.clocks = Clocks(self.workers, step, set(everyone), dict.fromkeys(everyone, step))
        self._next, self._highest = step * self.workers, step - 1
        self.waiting, self.asking, self.outstanding, self.log, self.dropped_log = [], set(), {}, [], []

    # What workers send:

    def ask(self, worker: int, limit: int) -> None:
        """A worker wants a ticket."""
        self._admit(worker)
        self.limit = max(self.limit, limit) if self.limit < 1 << 60 else limit
        self.asking.add(worker)

    def push(self, push: Push, *, stop: bool = False, now_s: float = 0.0, asks: bool = True) -> list[Dropped]:
        """A gradient has arrived, and the worker wants the next ticket."""
        late = push.worker not in self.clocks.members
        self._admit(push.worker)
        if push.worker in self._since:
            self._durations.append(now_s - self._since.pop(push.worker))
        self.clocks.reading.pop(push.worker, None)
        self.outstanding.pop(push.worker, None)
        self.clocks.clocks[push.worker] = push.step + 1
        if stop and not self.stopping:
            self.stopping = True
            self.limit = min(self.limit, max(self._highest, push.step) + 1)
        if asks:
            self.asking.add(push.worker)
        if late and self.rule.by_tickets:
            return [self._dropped(push)]  # Its ticket was handed out again.
        self.waiting.append(push)
        return []

    def lose(self, worker: int) -> None:
        """A worker was killed, or is given up on: no one waits for it, and its ticket is another's."""
        self.clocks.members.discard(worker)
        self.clocks.reading.pop(worker, None)
        self.asking.discard(worker)
        self._since.pop(worker, None)
        ticket = self.outstanding.pop(worker, None)
        if ticket is not None and self.rule.by_tickets:
            self.returned.append(ticket)
            self.repeated += 1

    def late(self, now_s: float) -> list[int]:
        """Workers that take far longer than a ticket took so far."""
        if len(self._durations) < 2 * self.workers:
            return []
        allowed_s = max(SHORTEST_S, PATIENCE * statistics.median(self._durations))
        return [worker for worker, since_s in self._since.items() if now_s - since_s > allowed_s]

    def _admit(self, worker: int) -> None:
        """Whoever sends is there, also if it had been given up on: it goes on from the present version."""
        if worker not in self.clocks.members:
            self.clocks.members.add(worker)
            self.clocks.clocks[worker] = self.clocks.version

    # What to do:

    def decide(self, now_s: float = 0.0) -> Iterator[Action]:
        """All that is to be done now, in order. An update counts as made once the next action is asked for."""
        while (action := self._next_action(now_s)) is not None:
            yield action

    def _next_action(self, now_s: float) -> Action | None:
        chosen = self.rule.choose(self.waiting, self.clocks, flush=self._all_in)
        if chosen.drop:
            push = chosen.drop[0]
            self.waiting.remove(push)
            self.clocks.clocks[push.worker] = max(self.clocks.clocks[push.worker], self.clocks.version)
            return self._dropped(push)
        if chosen.apply:
            return self._update(sorted(chosen.apply))
        for worker in sorted(self.asking):
            answer = self._answer(worker)
            if answer is not None:
                self.asking.discard(worker)
                if answer.ticket is not None:
                    self._since[worker] = now_s
                    self.clocks.reading[worker] = self.clocks.version
                    self.outstanding[worker] = answer.ticket
                    self._highest = max(self._highest, answer.ticket[0])
                return answer
        return None

    def _dropped(self, push: Push) -> Dropped:
        self.dropped += 1
        self.dropped_log.append(push.row)
        return Dropped(push)

    def _update(self, pushes: list[Push]) -> Update:
        ages = [self.clocks.version - push.version for push in pushes]
        self.waiting = [push for push in self.waiting if push not in pushes]
        self.staleness.update(ages)
        self.log.append([push.row for push in pushes])
        self.clocks.version += 1
        mean = sum(ages) / len(ages)
        newest = max(pushes, key=lambda push: push.step)
        return Update(pushes, newest.lr_factor * self.rule.rate(mean), mean)

    @property
    def _all_in(self) -> bool:
        """Whether no gradient is under way and no ticket before the limit is left."""
        return not self.outstanding and not self.returned and self._next // self.workers >= self.limit

    def _answer(self, worker: int) -> Answer | None:
        clocks = self.clocks
        if self.rule.by_tickets:
            if self._all_in and not self.waiting:
                return Answer(worker, None, self.limit, self.stopping)
            if not self.rule.may_read(worker, clocks):
                return None
            ticket = self._take()
            return None if ticket is None else Answer(worker, ticket, ticket[0], False)
        mine = clocks.clocks[worker] = max(clocks.clocks[worker], clocks.version)
        if mine >= self.limit or clocks.version >= self.limit:
            done = clocks.version >= self.limit
            return Answer(worker, None, self.limit, self.stopping) if done else None
        if not self.rule.may_read(worker, clocks):
            return None
        self.apart[mine - clocks.slowest] += 1
        return Answer(worker, (mine, worker), mine, False)

    def _take(self) -> Ticket | None:
        if self.returned:
            return self.returned.popleft()
        if self._next // self.workers >= self.limit:
            return None
        self._next += 1
        return divmod(self._next - 1, self.workers)

    def report(self) -> dict[str, Any]:
        """For the record of a run."""
        made = sum(self.staleness.values())
        found: dict[str, Any] = {
            "updates": len(self.log),
            "gradients": made,
            "dropped": self.dropped,
            "repeated": self.repeated,
            "staleness": {str(age): times for age, times in sorted(self.staleness.items())},
            "staleness_mean": sum(age * times for age, times in self.staleness.items()) / made if made else 0.0,
            "staleness_max": max(self.staleness, default=0),
        }
        if self.apart:
            found["clocks_apart"] = {str(steps): times for steps, times in sorted(self.apart.items())}
        return found
