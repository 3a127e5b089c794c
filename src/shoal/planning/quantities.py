"""Numbers of a plan as people read them: a unit and three digits."""

from __future__ import annotations

from typing import Any

GB = 1e9


def seconds(value: float) -> str:
    """A time with its unit, three digits."""
    for limit, unit, name in ((0.1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (2 * 86400, 3600, "h")):
        if value < limit:
            return f"{digits(value / unit)} {name}"
    return f"{digits(value / 86400)} days"


def gigabytes(value_bytes: float) -> str:
    """Memory with its unit."""
    return f"{value_bytes / GB:,.1f} GB" if value_bytes >= 0.1 * GB else f"{value_bytes / 1e6:.3g} MB"


def energy(kwh: float) -> str:
    """Energy with its unit, three digits."""
    for limit, unit, name in ((1, 1e-3, "Wh"), (1e4, 1, "kWh"), (1e7, 1e3, "MWh")):
        if kwh < limit:
            return f"{digits(kwh / unit)} {name}"
    return f"{digits(kwh / 1e6)} GWh"


def amount(row: dict[str, Any]) -> str:
    """A cost, in money or device-hours."""
    return f"{digits(row['cost'])}{'' if row['cost_in'] == 'money' else ' device-h'}"


def digits(value: float) -> str:
    """Three digits, and all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
