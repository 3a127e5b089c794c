"""One run of a mixture of experts, as one rank saw it: what the formulas for its traffic read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """What one run of a layer sent, as one rank saw it: what `estimate/expert_traffic.py` predicts the ledger from."""

    axis: str
    index: int
    """This rank's place among the ranks."""
    phase: str
    trained: bool
    """Whether backward goes through this very run."""
    counts_bytes: int
    """The vector of counts, to all ranks together."""
    sent_rows: tuple[int, ...]
    """Rows to each rank, this one included."""
    received_rows: tuple[int, ...]
    row_bytes: int
    weight_bytes: int
    """Of the weight of a row where it travels apart from it; 0 where it does not."""
    answer_bytes: int
