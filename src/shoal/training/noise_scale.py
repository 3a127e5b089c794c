"""The gradient noise scale of a run, smoothed over its steps: the critical batch size (McCandlish et al. 2018).

Noise and signal are averaged separately, since the ratio of single steps is biased. The noise scale grows while a model
learns, by orders of magnitude at first, so averages forget: a step has the weight 1 - 1/MEMORY of the one after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.parallel.noise import MeasuredNoise

MEMORY = 25
"""Steps that an average remembers."""
ENOUGH = 10
"""Steps before which an average says nothing."""


class NoiseScale:
    """Averages of noise and signal, in samples."""

    def __init__(self, state: Sequence[float] = (0, 0.0, 0.0)) -> None:
        self.steps, self.noise, self.signal = int(state[0]), float(state[1]), float(state[2])

    @property
    def state(self) -> list[float]:
        """For a checkpoint."""
        return [self.steps, self.noise, self.signal]

    def add(self, found: MeasuredNoise | None, *, samples_per_count: float) -> None:
        """One step; `samples_per_count`: where losses count tokens, how many samples a token is."""
        if found is None:
            return
        self.steps += 1
        weight = 1 / (MEMORY * (1 - (1 - 1 / MEMORY) ** self.steps))  # Weights of all steps so far add up to 1.
        self.noise += weight * (found.noise * samples_per_count - self.noise)
        self.signal += weight * (found.signal - self.signal)

    @property
    def critical_batch(self) -> float | None:
        """Samples; None while unknown, or where noise hides the signal."""
        if self.steps < ENOUGH or self.signal <= 0 or self.noise <= 0:
            return None
        return self.noise / self.signal
