"""Replicas that parameter servers tie together: parameters are the servers', so only buffers differ between islands.

What is evaluated and saved has the mean of their floating-point buffers, as with islands that exchange models.
"""

from __future__ import annotations

from torch import nn

from shoal.parallel.placement import Placement
from shoal.parallel.sync.outer import OuterLevel
from shoal.parallel.sync.scheme import Scheme


class OnlyBuffers(Scheme):
    """Nothing is kept and nothing exchanged: not a term, the scheme of a level that has servers."""

    family = "sync"


class ServedLevel(OuterLevel):
    """A loose level of dp with servers, as one rank sees it."""

    def __init__(self, placement: Placement, model: nn.Module) -> None:
        super().__init__(object.__new__(OnlyBuffers), placement, [], model, [])

    def after_update(self, clock: int, *, count: float, stop: bool) -> bool:
        """Servers have made the update, or will."""
        if self.buffers:
            self.count += count
            self.steps += 1
        return stop
