"""How noisy gradients are: the squares of the gradients of small batches, which ranks and micro-batches compute anyway.

With gradient sums g_i of n small batches that count c_i samples (or tokens) each, C in all, and the mean gradient G of
the step, the noise S (the trace of the covariance of one sample's gradient) and the squared true gradient are

    S        = (sum of |g_i|^2 / c_i  -  C |G|^2) / (n - 1)
    |true|^2 = |G|^2 - S / C

Both are unbiased for any sizes c_i: E |g_i|^2 / c_i = c_i |true|^2 + S. For two sizes they are the estimators of
McCandlish et al. 2018 (appendix A), whose simple noise scale S / |true|^2 is the batch above which larger ones save
few steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MeasuredNoise:
    """Of one step; single steps are far off, and either number may be negative."""

    noise: float
    """Of the gradient of one sample (or token)."""
    signal: float
    """The squared norm of the true gradient."""


class GradientNoise:
    """Adds up the squares of this rank's small gradients in a step."""

    NUMBERS = 2
    """What it adds to the sums of a step."""

    def __init__(self, counts: bool) -> None:
        """`counts`: of several ranks that hold parts of the same gradient, one counts it."""
        self._counts = counts
        self._squares: list[torch.Tensor] = []
        self._spread: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []

    def see(self, gradient: torch.Tensor, holders: int) -> None:
        """One parameter's gradient of a micro-batch, which this number of ranks holds alike."""
        self._squares.append(torch.linalg.vector_norm(gradient.detach()).double().square() / holders)

    def close(self, count: torch.Tensor | float) -> None:
        """The end of a micro-batch, which counts this much."""
        if not self._squares:
            return
        squares = torch.stack(self._squares).sum()
        counted = torch.as_tensor(count, dtype=torch.float64, device=squares.device).detach().reshape(())
        self._spread.append(torch.where(counted > 0, squares / counted, 0.0))
        self._parts.append((counted > 0).double() * self._counts)
        self._squares = []

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """The sum of squares by count and the number of small batches, since this was last asked."""
        found = like.new_zeros(self.NUMBERS)
        if self._spread:
            found = torch.stack([torch.stack(self._spread).sum(), torch.stack(self._parts).sum()]).to(like)
        self._spread, self._parts = [], []
        return found


def measured(spread: float, parts: float, count: float, norm: float) -> MeasuredNoise | None:
    """From the sums over all ranks; nothing where a step had one small batch only, or was not watched."""
    if parts < 2:
        return None
    noise = (spread - count * norm**2) / (parts - 1)
    return MeasuredNoise(noise, norm**2 - noise / count)
