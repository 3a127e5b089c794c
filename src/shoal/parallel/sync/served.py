"""Replicas that parameter servers tie together: parameters are the servers', so only buffers differ between islands.

What is evaluated and saved has the mean of their floating-point buffers, as with islands that exchange models.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.parallel.placement import Placement
from shoal.parallel.sync.outer import OuterLevel


class ServedLevel(OuterLevel):
    """A loose level of dp with servers, as one rank sees it."""

    def __init__(self, placement: Placement, model: nn.Module) -> None:
        super().__init__(_OnlyBuffers(), placement, [], model)  # type: ignore[arg-type]

    def after_update(self, clock: int, *, count: float, stop: bool) -> bool:
        """Servers have made the update, or will."""
        if self.buffers:
            self.count += count
            self.steps += 1
        return stop


class _OnlyBuffers:
    """Nothing is kept and nothing exchanged; what is evaluated has the mean of the buffers."""

    equal = True

    def begin(self, parameters: Any) -> dict[str, Any]:
        return {}

    def numbers(self) -> dict[str, float]:
        return {}

    def agree(self, level: OuterLevel, weight: float) -> None:
        level.average(weight)
