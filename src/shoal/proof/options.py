"""The options of one proof, as they travel to its processes."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.runtime.options import JobOptions


@dataclass(frozen=True, kw_only=True)
class ProofOptions(JobOptions):
    """A job, a strategy, and how the two runs are compared."""

    strategy: str
    num_steps: int
    """Optimiser steps to compare."""
    exact: bool = True
    """Whether every number is compared in float64, or the loss curve alone."""
    reference: str = ""
    """The file in which the serial run leaves its tensors."""
    micro_batches: int = 1
    """Into which the serial run splits each batch, where that changes what is computed."""
    parts: int = 1
    """Into which it splits each of these."""
    disturbances: int = 0
    """Serial runs with another order of sums, which measure the conditioning."""
    reverse: bool = False
    """Whether another order of samples is another order of sums only."""
