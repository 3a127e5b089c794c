"""The collectives of a tensor-parallel axis, noted where they are called.

A crossing is one call of a collective of `parallel/collectives.py` on a tensor of known size. The engine notes them;
`estimate/tensor_traffic.py` computes what each sends, forward and backward, and a step's ledger must agree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """One tensor-parallel collective."""

    how: str
    """The collective: "copy_in", "sum_out", "gather", "scatter_sum", "split", "gather_whole"."""
    whole_bytes: int
    """Size of the full tensor that all ranks' parts (or partial sums) form; padded, if parts are uneven."""
    gradient: bool = True
    """Whether its backward sends a gradient."""
    again: bool = False
    """Whether it is a recomputation inside backward; the gradient belongs to the first call."""


class Tally:
    """Counts each crossing since the last `take`."""

    def __init__(self) -> None:
        self.counts: Counter[Crossing] = Counter()

    def note(self, crossing: Crossing) -> None:
        self.counts[crossing] += 1

    def take(self) -> Counter[Crossing]:
        """The counts since the last `take`; resets them."""
        taken, self.counts = self.counts, Counter()
        return taken
