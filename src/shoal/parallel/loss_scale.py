"""Loss scaling for fp16 (Micikevicius et al. 2018).

The loss is multiplied before backward, so that small gradients do not become zero in 16 bits, and gradients are divided
by the same factor. A step whose gradients overflow is skipped by all ranks, since the norm that shows it is the same on
all; the factor is then halved. After many good steps it is doubled.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

START = 1024.0
"""Losses are sums here, not means: their gradients are larger by the number of tokens."""
GROW_AFTER = 2000
LEAST, MOST = 2.0**-14, 2.0**24


class LossScale:
    """The factor of one run."""

    def __init__(self) -> None:
        self.factor = START
        self.good_steps = 0
        self.skipped = 0
        """Steps skipped so far."""

    def passed(self, *numbers: float) -> bool:
        """Takes in a step's loss and norm; whether the step counts. The same on every rank."""
        if all(map(isfinite, numbers)):
            self.good_steps += 1
            if self.good_steps >= GROW_AFTER:
                self.factor, self.good_steps = min(2 * self.factor, MOST), 0
            return True
        self.factor, self.good_steps = self.factor / 2, 0
        self.skipped += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether the overflow cannot be the scale's."""
        return self.factor < LEAST

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"factor": self.factor, "good_steps": self.good_steps, "skipped": self.skipped}

    def load(self, saved: Any) -> None:
        """From a checkpoint; of one without it (of another precision) the scale begins anew."""
        if isinstance(saved, dict):
            self.factor = float(saved["factor"])
            self.good_steps, self.skipped = int(saved["good_steps"]), int(saved["skipped"])
