"""`Estimate`: what Shoal says of a strategy before it runs. A Run has the same fields, so any prediction can be
compared with its measurement. Fields that were not estimated (or not measured) are None or empty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.comm.ledger import Ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Strategy x workload x cluster."""

    strategy: str
    world: int
    step_s: float | None = None
    step_split: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step by cause: compute, exposed communication, bubble, optimiser, ..."""
    memory_bytes: int | None = None
    """Peak of the rank that needs most."""
    memory_split: Mapping[str, int] = field(default_factory=dict)
    """Bytes by cause: parameters, gradients, optimiser, activations, buffers."""
    ledger: Ledger = field(default_factory=Ledger)
    """What one rank sends in a steady-state step."""
    steps_to_target: float | None = None
    time_to_target_s: float | None = None
