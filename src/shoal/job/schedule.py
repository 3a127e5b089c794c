"""Learning-rate schedules: functions of the step number alone. They hold no state, so a restart, or a change
of strategy in the middle of a run, needs nothing but the step to continue the same curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def constant(step: int) -> float:
    """The base learning rate at every step."""
    return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupCosine:
    """Linear warm-up over `warmup` steps, then half a cosine down to `floor` at step `steps`, and `floor`
    from there on.
    """

    steps: int
    warmup: int = 0
    floor: float = 0.0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        if step >= self.steps:
            return self.floor
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDecay:
    """The factor is multiplied by `gamma` at each step named in `at`."""

    at: tuple[int, ...]
    gamma: float = 0.1

    def __call__(self, step: int) -> float:
        return float(self.gamma ** sum(step >= boundary for boundary in self.at))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cyclic:
    """Half a cosine from the base rate to zero, `cycles` times over: each end is a model of its own, a snapshot of one
    run that together make an ensemble (Huang et al. 2017).
    """

    steps: int
    cycles: int

    def __call__(self, step: int) -> float:
        length = max(1, self.steps // self.cycles)
        return 0.5 * (1.0 + math.cos(math.pi * (step % length) / length))
