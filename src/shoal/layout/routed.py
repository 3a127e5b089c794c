"""One run of a mixture of experts on one rank: the input of the traffic formulas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """What one run of a layer sent from one rank; `estimate/expert_traffic.py` predicts the ledger from it."""

    axis: str
    index: int
    """This rank's index on the axis."""
    phase: str
    trained: bool
    """Whether backward goes through this run."""
    counts_bytes: int
    """The vector of counts, to all ranks together."""
    sent_rows: tuple[int, ...]
    """Rows to each rank, this one included."""
    received_rows: tuple[int, ...]
    row_bytes: int
    weight_bytes: int
    """Bytes of a row's routing weight if it is sent separately; 0 if not."""
    answer_bytes: int
