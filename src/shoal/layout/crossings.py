"""What passes between the ranks of a tensor-parallel axis, noted where it happens.

A crossing is one use of one of the collectives of `parallel/collectives.py` on a tensor of so many bytes. What runs
notes them; `estimate/tensor_traffic.py` says what each sends, forward and backward, and a step's ledger must agree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """One tensor on its way across the ranks."""

    how: str
    """The collective: "copy_in", "sum_out", "gather", "scatter_sum", "split", "gather_whole"."""
    whole_bytes: int
    """Of the tensor that all ranks' parts (or partial sums) make together; padded, where parts are uneven."""
    gradient: bool = True
    """Whether a gradient comes back this way."""
    again: bool = False
    """Whether it is a repetition inside backward; the gradient belongs to the first time."""


class Tally:
    """How often each crossing was made since the last `take`."""

    def __init__(self) -> None:
        self.counts: Counter[Crossing] = Counter()

    def note(self, crossing: Crossing) -> None:
        self.counts[crossing] += 1

    def take(self) -> Counter[Crossing]:
        """What was noted since the last take; the count starts anew."""
        taken, self.counts = self.counts, Counter()
        return taken
