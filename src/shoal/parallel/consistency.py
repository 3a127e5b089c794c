"""How consistent the replicas of a run were, as this rank measured it: an engine has one, whatever writes to it.

    spread        relative distance between islands at an exchange: root mean square, over the norm of their mean
    staleness     updates between the read of the parameters and the use of the gradient -> how often
    ahead         steps by which this replica was ahead of the slowest one when it looked -> how often
    saved_bytes   what a bsp level in the place of the loose one would have sent, less what was sent

run.json has more where islands run at their own speed (`parallel/sync/tickets.py`). Steps' rows, the progress line,
TensorBoard and run.json read `row` and `summary`; entries that nothing wrote to are left out, so that a synchronous
run reports nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Consistency:
    """What was measured so far. Parts of the engine write to it; nothing here communicates."""

    rounds: int = 0
    """Exchanges of islands that were completed."""
    spread: float | None = None
    widest: float = 0.0
    """The largest spread."""
    staleness: Counter[int] = field(default_factory=Counter)
    ahead: Counter[int] = field(default_factory=Counter)
    sent_bytes: int = 0
    """By this rank, between replicas of the loose level."""
    synchronous_bytes: int = 0
    """What it would have sent there if gradients were all-reduced in every step."""

    def exchanged(self, spread: float | None = None) -> None:
        """A round of islands is over; `spread` is the newest that is known."""
        self.rounds += 1
        if spread is not None:
            self.measured(spread)

    def measured(self, spread: float) -> None:
        """Islands are that far apart."""
        self.spread, self.widest = spread, max(self.widest, spread)

    def stale(self, updates: int, times: int = 1) -> None:
        """A gradient was used that many updates after its parameters were read."""
        self.staleness[updates] += times

    def looked(self, steps_ahead: int) -> None:
        """This replica read the clocks of the others, and was that many steps ahead of the slowest."""
        self.ahead[steps_ahead] += 1

    def sent(self, counted_bytes: int, synchronous_bytes: int) -> None:
        """A step sent this between replicas of the loose level; a bsp level would have sent `synchronous_bytes`."""
        self.sent_bytes += counted_bytes
        self.synchronous_bytes += synchronous_bytes

    def row(self) -> dict[str, float]:
        """For a step's row: the newest of each."""
        found: dict[str, float] = {}
        if self.rounds:
            found["rounds"] = self.rounds
        if self.spread is not None:
            found["spread"] = self.spread
        if self.staleness:
            found["staleness"] = _mean(self.staleness)
        if self.ahead:
            found["ahead"] = max(self.ahead)
        if self.synchronous_bytes:
            found["saved_bytes"] = self.synchronous_bytes - self.sent_bytes
        return found

    def summary(self) -> dict[str, Any]:
        """For run.json, under "consistency"."""
        found: dict[str, Any] = dict(self.row())
        if self.spread is not None:
            found["widest_spread"] = self.widest
        for name, seen in (("staleness", self.staleness), ("ahead", self.ahead)):
            if seen:
                found[name] = {"mean": _mean(seen), "max": max(seen), "histogram": dict(sorted(seen.items()))}
        if self.synchronous_bytes:
            found |= {"sent_bytes": self.sent_bytes, "synchronous_bytes": self.synchronous_bytes}
        return found


def _mean(seen: Mapping[int, int]) -> float:
    return sum(value * times for value, times in seen.items()) / sum(seen.values())
