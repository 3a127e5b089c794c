"""What the ranks of a calibration are started with, named without loading torch."""

from __future__ import annotations

from typing import Any


def measure_here(arguments: dict[str, Any], channel: Any) -> Any:
    """On every rank: seconds of each collective, by round, and on rank 0 of this machine's operators."""
    from shoal.calibration.measure import measure

    return measure(arguments, channel)
