"""When islands do something together: evaluate, save, stop.

Within an island ranks step together, and its own collectives serve its steps. What needs all islands waits for the next
exchange: an evaluation or a checkpoint that falls between two exchanges is made at the second, and so does a stop that
one island was asked for. The end of the run is the last such exchange. Without islands every step is one.
"""

from __future__ import annotations

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
