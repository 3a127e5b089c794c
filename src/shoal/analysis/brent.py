"""Brent's bounds: how long p processors need for work W and depth D, max(W/p, D) <= T_p <= W/p + D.

Time is counted in operations. T_1 = W, and no number of processors gets below D; W/D is the number beyond which more
of them no longer pay. (The survey prints min on the left, which is a slip.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.analysis.operator import Cost

PROCESSORS = (*(step * 10**power for power in range(6) for step in (1, 2, 5)), 10**6)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeBounds:
    """Of a time on `processors`, in operations."""

    processors: int
    least: float
    most: float

    def speedup(self, work: int) -> tuple[float, float]:
        """Over one processor, at least and at most."""
        return work / self.most, work / self.least


def time_bounds(cost: Cost, processors: int) -> TimeBounds:
    if processors < 1:
        raise ValueError(f"{processors} processors compute nothing; expected at least 1")
    share = cost.work / processors
    return TimeBounds(processors=processors, least=max(share, float(cost.depth)), most=share + cost.depth)


def bounds_table(cost: Cost, processors: Iterable[int] = PROCESSORS) -> list[TimeBounds]:
    return [time_bounds(cost, each) for each in processors]
