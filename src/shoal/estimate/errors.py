"""How far predictions were from what was measured, for the error bars of plans, and what no measurement stands behind.

One place for figures that docs/validation.md explains; a test holds them to that page.
"""

from __future__ import annotations

STEP_ERROR = 0.11
"""Mean error of 2,056 published step times."""
MEMORY_ERROR = 0.10
"""Mean error of 940 published peaks, each size of model left out of the fit in turn."""
ORIGIN = "mean errors of 2,056 measured step times and 940 memories (docs/validation.md)"

MEASURED_DEVICES = ("A100", "H100")
"""How the names of devices begin whose steps were measured."""
MEASURED_SCHEDULES = ("none", "1f1b", "interleaved")
UNMEASURED = {
    "context": "context parallelism (six rows)",
    "experts": "experts",
    "schedule": "its pipeline schedule",
    "compression": "compression between nodes",
    "local": "local steps",
    "device": "steps on this device",
}
"""What no or hardly any row of the validation shows: there the error may be larger than the bars say."""


def around(value: float, error: float) -> tuple[float, float]:
    """(least, most) that may be measured where `value` was predicted with that error, a part of the measured."""
    return value / (1 + error), value / (1 - error)
