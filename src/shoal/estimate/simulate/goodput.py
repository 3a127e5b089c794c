"""How much of the time a run that fails now and then makes progress: checkpoints, restarts, and the best interval.

Failures come at random at a constant rate. Young (1974): the best interval is sqrt(2 C M) for a checkpoint of C seconds
and a mean time M between failures; Daly (2006): the expected time of a run with it, restarts and lost work included.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

STATE_BYTES = 14
"""A parameter in a checkpoint: weights in 16 bits, master weights and two moments in 32."""
STORAGE_BYTES_PER_S = 2e9
"""Of one node, to shared storage. Assumed: a parallel file system that gives each node a quarter of a 100 Gb/s card."""
DEVICE_MTBF_H = 50_000.0
"""Mean time between failures of one device with its share of a host. From 419 interruptions in 54 days on 16,384
devices (Llama team 2024, section 3.3.4): 16,384 x 54 x 24 / 419 = 50,700 hours."""
RESTART_S = 300.0
"""To notice a failure, replace the host, start ranks and read the checkpoint. Assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Of a run with failures."""

    mtbf_s: float
    """Mean time between failures of the full job."""
    checkpoint_s: float
    restart_s: float
    interval_s: float
    """Work between checkpoints."""
    part: float
    """Of the time that ends up as progress."""

    def steps(self, step_s: float) -> int:
        """Steps between checkpoints."""
        return max(1, round(self.interval_s / step_s))


def young_interval_s(*, checkpoint_s: float, mtbf_s: float) -> float:
    """Young's interval, with Daly's correction where checkpoints are not short against failures."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    return sqrt(2 * checkpoint_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def goodput(
    *,
    devices: int,
    checkpoint_s: float,
    restart_s: float = RESTART_S,
    device_mtbf_h: float = DEVICE_MTBF_H,
    interval_s: float | None = None,
) -> Goodput:
    """Expected goodput, with the best interval unless one is given."""
    for name, value in (("checkpoint_s", checkpoint_s), ("restart_s", restart_s)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value:g}; expected seconds, at least 0")
    if not device_mtbf_h > 0:
        raise ValueError(f"device_mtbf_h is {device_mtbf_h:g}; expected hours above 0")
    if interval_s is not None and not interval_s > 0:
        raise ValueError(f"interval_s is {interval_s:g}; expected seconds above 0")
    mtbf_s = device_mtbf_h * 3600 / devices
    best_s = max(1e-3, young_interval_s(checkpoint_s=checkpoint_s, mtbf_s=mtbf_s))
    work_s = best_s if interval_s is None else interval_s
    # Daly: a stretch of work and its checkpoint takes M e^(R/M) (e^((w + C)/M) - 1) on average.
    span = (work_s + checkpoint_s) / mtbf_s
    part = (
        0.0 if span > 500 or restart_s / mtbf_s > 500 else (work_s / (mtbf_s * exp(restart_s / mtbf_s) * expm1(span)))
    )
    return Goodput(
        mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=restart_s, interval_s=work_s, part=min(1.0, part)
    )


def checkpoint_time_s(*, parameters: float, nodes: int, bytes_per_s: float = STORAGE_BYTES_PER_S) -> float:
    """All nodes write their part side by side."""
    return STATE_BYTES * parameters / (nodes * bytes_per_s)
