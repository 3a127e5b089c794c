"""Local SGD: islands step by themselves and average their parameters every h steps (`sync=local(h)`).

An island's weight in the mean is the part of the samples (or tokens) that it learned from since the last exchange, as
in FedAvg: with uneven shares, h = 1 and plain SGD the mean is then the synchronous step. Optimiser state stays local.
"""

from __future__ import annotations

from shoal.parallel.sync.outer import OuterLevel
from shoal.strategy.terms.sync import local


class LocalSteps(OuterLevel):
    """Averages parameters and buffers every h steps."""

    term: local

    def exchanges_after(self, clock: int) -> bool:
        return (clock + 1) % self.term.h == 0

    def exchange(self, weight: float) -> None:
        self.average(weight)
