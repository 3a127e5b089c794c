"""When islands do something together: evaluate, save, stop.

Within an island ranks step together, and its own collectives serve its steps. What needs all islands waits for the next
exchange: an evaluation or a checkpoint that falls between two exchanges is made at the second, and so does a stop that
one island was asked for. The end of the run is the last such exchange. Without islands every step is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Islands exchange every `period` steps."""

    period: int

    def due(self, step: int, every: int) -> bool:
        """Whether something that is wanted every `every` steps (0: never) is done after `step` steps."""
        if not every or step % self.period:
            return False
        return step // every > (step - self.period) // every


def next_limit(step: int, steps: int, *every: int) -> int:
    """The step at which replicas under servers stand together next, after `step`: the next that is due to be evaluated
    or saved, or the end."""
    return min([steps, *((step // each + 1) * each for each in every if each)])


@dataclass
class Counters:
    """The sample counter at which each step begins, from a known one on. Tickets may come in any order."""

    after: Callable[[int], int]
    """The counter of the step that follows the one at a counter."""
    known: dict[int, int]

    def at(self, step: int) -> int:
        last = max(self.known)
        while last < step:
            self.known[last + 1] = self.after(self.known[last])
            last += 1
        return self.known[step]
