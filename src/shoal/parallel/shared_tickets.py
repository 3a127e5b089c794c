"""Shares of batches handed out through shared memory, where replicas update one copy of the parameters (`hogwild()`).

A *ticket* is one share of one global batch; a replica that is free takes the next one. Tickets and counts are changed
under a lock that the kernel releases with its process; parameters are not. All replicas stop at a *limit*, a step at
which they evaluate, save or end, and none goes on before all have asked to.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal.comm.mesh import Members
from shoal.comm.points import reach
from shoal.comm.shared_block import SharedBlock

NO_LIMIT = 1 << 60
NEXT, LIMIT, VERSION, STOPPING, RETURNED, REPEATED, HIGHEST = range(7)
"""Words of the block: the next ticket, the step to stop at, updates so far, whether to end there, tickets that lost
replicas leave, how many were handed out twice, the highest step that was begun."""
FIRST, EACH = 8, 4
ASKED, TICKET, READ, GONE = range(EACH)
"""Words of each replica: the limit that it asked for, what it computes (from 1, 0: nothing), the updates in what it
read, and whether it was lost."""
AGES = 256
"""Stalenesses that are counted; a larger one counts as the last."""
WORD = 8
WAIT_S, LOOK_S = 0.0005, 0.05


class SharedTickets:
    """One replica's view. Collective to make."""

    by_tickets = True
    together = False
    norm = float("nan")

    def __init__(self, members: Members) -> None:
        self.replica, self.replicas = members.index, members.size
        self._tickets_at = FIRST + EACH * members.size
        self._ages_at = self._tickets_at + members.size
        words = self._ages_at + AGES
        self._block = SharedBlock(members, words * WORD, keep_open=True)
        self._words = self._block.view[: words * WORD].cast("q")
        self.step, self.share = 0, self.replica
        self.stop = False
        """Whether this replica was asked to stop."""
        self.paused = self.stopping = False
        """Whether all work before the limit is done; whether the run ends there."""
        self.lost: Callable[[], list[int]] = list
        """The ranks that were killed."""
        self.log: list[list[int]] | None = None
        """In a proof: the updates of this replica, as (version, replica, step, share, version read)."""
        self._ranks = members.ranks
        self._looked_s = 0.0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._block.lock(0)
        try:
            yield
        finally:
            self._block.unlock(0)

    def _of(self, replica: int, what: int) -> int:
        return FIRST + EACH * replica + what

    def _living(self) -> list[int]:
        return [replica for replica in range(self.replicas) if not self._words[self._of(replica, GONE)]]

    def begin(self, step: int) -> None:
        """All replicas stand at a step: the start, or a checkpoint. All call it before the first asks."""
        with self._locked():
            self._words[NEXT], self._words[HIGHEST] = step * self.replicas, step - 1
        self.step = step

    def ask(self, limit: int) -> None:
        """Asks for the next ticket before a limit, at the start and after a pause."""
        with self._locked():
            self._words[LIMIT] = max(self._words[LIMIT], limit)
            self._words[self._of(self.replica, ASKED)] = limit
        self._wait(lambda: all(self._words[self._of(other, ASKED)] >= limit for other in self._living()))
        self.paused = False
        self._take()

    def finish(self) -> int:
        """After an update: counts it and takes the next ticket. How many updates others made since its parameters were
        read."""
        mine = self._of(self.replica, TICKET)
        with self._locked():
            words = self._words
            read = words[self._of(self.replica, READ)]
            age = words[VERSION] - read
            if self.log is not None:
                self.log.append([words[VERSION], self.replica, self.step, self.share, read])
            words[VERSION] += 1
            words[self._ages_at + min(age, AGES - 1)] += 1
            words[mine] = 0
            if self.stop and not words[STOPPING]:
                words[STOPPING] = 1
                words[LIMIT] = min(words[LIMIT], words[HIGHEST] + 1)
        reach("hogwild: updated")
        self._take()
        return age

    def _take(self) -> None:
        self._wait(self._next)

    def _next(self) -> bool:
        """Takes a ticket, or pauses; whether either can be done now."""
        words = self._words
        with self._locked():
            limit = words[LIMIT]
            if words[RETURNED]:
                words[RETURNED] -= 1
                words[REPEATED] += 1
                ticket = words[self._tickets_at + words[RETURNED]]
            elif words[NEXT] // self.replicas < limit:
                ticket = words[NEXT]
                words[NEXT] += 1
            elif any(words[self._of(other, TICKET)] for other in self._living()):
                return False
            else:
                self.paused, self.step, self.stopping = True, limit, bool(words[STOPPING])
                return True
            self.step, self.share = divmod(ticket, self.replicas)
            words[HIGHEST] = max(words[HIGHEST], self.step)
            words[self._of(self.replica, TICKET)] = ticket + 1
            words[self._of(self.replica, READ)] = words[VERSION]
        return True

    def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            time.sleep(WAIT_S)
            if time.monotonic() - self._looked_s > LOOK_S:
                self._looked_s = time.monotonic()
                self._release_lost()

    def _release_lost(self) -> None:
        """What a killed replica was computing is another's."""
        gone = [self._ranks.index(rank) for rank in self.lost() if rank in self._ranks]
        for replica in gone:
            with self._locked():
                if self._words[self._of(replica, GONE)]:
                    continue
                self._words[self._of(replica, GONE)] = 1
                ticket = self._words[self._of(replica, TICKET)]
                if ticket:
                    self._words[self._tickets_at + self._words[RETURNED]] = ticket - 1
                    self._words[RETURNED] += 1
                    self._words[self._of(replica, TICKET)] = 0

    def report(self) -> dict[str, Any]:
        """What was counted, of all replicas."""
        ages = {age: self._words[self._ages_at + age] for age in range(AGES)}
        counted = Counter({age: times for age, times in ages.items() if times})
        lost = [replica for replica in range(self.replicas) if replica not in self._living()]
        report = {
            "updates": self._words[VERSION],
            "gradients": self._words[VERSION],
            "dropped": 0,
            "repeated": self._words[REPEATED],
            "staleness": {str(age): times for age, times in counted.items()},
            "staleness_mean": sum(age * times for age, times in counted.items()) / max(1, counted.total()),
            "staleness_max": max(counted, default=0),
        }
        rows = [{"worker": each, "reason": "its process ended"} for each in lost]
        return report | ({"lost_workers": rows} if rows else {})

    def close(self) -> None:
        self._block.close()
