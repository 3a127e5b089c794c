"""Who computes which share of which step, where islands run at their own speed: pure bookkeeping, on the first island.

A global batch is split into as many shares as there were islands at the start. An island takes its own share of the
step that is due, or of the next one: islands of equal speed compute what they would without this. Whoever is two steps
ahead of another takes the oldest share that is left, so a slow island computes fewer shares and delays the others by no
more than the one it is at. Shares of an island that was lost are anyone's. Nothing is handed out beyond a *limit*, the
next step at which all islands evaluate, save or end.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

Ticket = tuple[int, int]
"""(step, share)"""
AHEAD = 2
"""Steps by which an island must be ahead of a share to take it from another."""
WAIT = object()
"""There is nothing to hand out yet, and all is not done either."""


@dataclass
class Shares:
    """The shares of one run."""

    islands: int
    """Shares of a step."""
    step: int
    """The first step."""
    members: set[int] = field(default_factory=set)
    """Islands that were not lost."""
    outstanding: dict[int, Ticket] = field(default_factory=dict)
    """What islands compute now."""
    stopping: bool = False
    taken_over: int = 0
    """Shares that another island computed."""
    repeated: int = 0
    """Shares that were handed out a second time, since the first island to have them was lost."""
    _left: dict[int, set[int]] = field(default_factory=dict)
    _next: int = 0
    _highest: int = -1
    _since: dict[int, float] = field(default_factory=dict)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def __post_init__(self) -> None:
        self.members = self.members or set(range(self.islands))
        self._next, self._highest = self.step, self.step - 1
        self.limit = self.step

    def done(self, island: int, now_s: float) -> None:
        """An island has computed what it had, if it had something."""
        self.members.add(island)
        if island in self._since:
            self._durations.append(now_s - self._since.pop(island))
        self.outstanding.pop(island, None)

    def until(self, limit: int, *, stop: bool) -> None:
        """Nothing is handed out from this step on. `stop`: an island was asked to end the run: all end after the last
        step that was begun."""
        if stop and not self.stopping:
            self.stopping = True
            self.limit = min(max(self.limit, limit), self._highest + 1)
        elif not self.stopping:
            self.limit = max(self.limit, limit)

    def take(self, island: int, now_s: float) -> Ticket | object | None:
        """The next share for an island; None if all before the limit are computed, WAIT if some are under way."""
        ticket = self._choose(island)
        if ticket is None:
            return WAIT if self.outstanding or any(step < self.limit for step in self._left) else None
        step, share = ticket
        self._left[step].discard(share)
        if not self._left[step]:
            del self._left[step]
        self.taken_over += share != island
        self.outstanding[island] = ticket
        self._since[island] = now_s
        self._highest = max(self._highest, step)
        return ticket

    def _choose(self, island: int) -> Ticket | None:
        while self._next < self.limit and len(self._left) < AHEAD:
            self._left[self._next] = set(range(self.islands))
            self._next += 1
        begun = sorted(step for step in self._left if step < self.limit)
        for step in begun[:AHEAD]:
            if island in self._left[step] and step < begun[0] + AHEAD:
                return step, island
        for step in begun:
            ownerless = [share for share in sorted(self._left[step]) if share not in self.members]
            if ownerless:
                return step, ownerless[0]
        if begun and begun[0] + AHEAD <= self.limit:
            return begun[0], max(self._left[begun[0]])
        return None

    def lose(self, island: int) -> None:
        """An island was killed: what it had is another's."""
        self.members.discard(island)
        self._since.pop(island, None)
        ticket = self.outstanding.pop(island, None)
        if ticket is not None:
            self._left.setdefault(ticket[0], set()).add(ticket[1])
            self.repeated += 1

    @property
    def share_s(self) -> float:
        """The median time to compute a share so far; 0 where none was."""
        return statistics.median(self._durations) if self._durations else 0.0
