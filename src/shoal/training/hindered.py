"""Ranks that are slowed or killed on purpose, to see what a scheme makes of it (`--straggler`, `--fail`).

A slow rank sleeps before it makes a step, in proportion to what it computed in its last one. Computing is the time that
its own thread ran on a core: what it waited for other ranks is not part of it, so stragglers do not multiply each other
and a busy machine does not make them slower.
"""

from __future__ import annotations

import os
import signal
import time

from shoal.common.hindrance import read_killed_ranks, read_slow_ranks
from shoal.training.options import TrainOptions


class Hindered:
    """What is done to one rank."""

    def __init__(self, options: TrainOptions, *, rank: int, world: int, seed: int) -> None:
        self._rank, self._seed = rank, seed
        self._slow = read_slow_ranks(options.straggler, world=world)
        self._killed = [each.step for each in read_killed_ranks(options.fail, world=world) if each.rank == rank]
        self._last: int | None = None
        self._started_s, self._computed_s = 0.0, 0.0
        self.slept_s = 0.0
        """In all steps."""

    def before_step(self, step: int) -> None:
        """`step`: counted from 1."""
        self.at_step(step)
        asleep_s = self.sleep_s(step)
        if asleep_s > 0:
            time.sleep(asleep_s)
            self.slept_s += asleep_s
        self._started_s = time.thread_time()

    def at_step(self, step: int) -> None:
        """Kills the rank if it is due."""
        # Where data is handed out by tickets, a rank may have no ticket of the named step: then its next one counts.
        if any((step if self._last is None else self._last + 1) <= at <= step for at in self._killed):
            os.kill(os.getpid(), signal.SIGKILL)
        self._last = step

    def after_step(self) -> None:
        self._computed_s = time.thread_time() - self._started_s

    def sleep_s(self, step: int) -> float:
        """How long this rank sleeps before a step."""
        striking = [each for each in self._slow if each.strikes(self._rank, step, self._seed)]
        added_s, factor = sum(each.added_s for each in striking), 1.0
        for each in striking:
            factor *= each.factor
        return added_s * factor + (factor - 1) * self._computed_s
