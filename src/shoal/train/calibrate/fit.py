"""The constants of a link from the times of all-reduces over it: the ones with which the model predicts them best.

The model (`comm/choice.py`) is linear in its three constants, so its own answers for unit constants are the rows of a
least-squares problem, and there is no second copy of its formulas to go astray. Errors are relative, since a choice
between two algorithms at a kilobyte matters as much as one at megabytes, and constants cannot be negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.comm.choice import all_reduce_time
from shoal.comm.network import LinkTimes, Network

Array = NDArray[Any]
UNITS = (LinkTimes(1.0, 0.0, 0.0), LinkTimes(0.0, 1.0, 0.0), LinkTimes(0.0, 0.0, 1.0))
ROUNDS = 30
NEAR = 0.01
"""Closer than this, errors weigh alike."""


class CannotFit(ValueError):
    """Times that no link could have."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An all-reduce that was measured."""

    algorithm: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A link's constants, and how far the model is from the times: the median of |predicted / measured - 1|."""

    link: LinkTimes
    error: float


def fit_link(times: Sequence[Timed], *, ranks: int) -> Fit:
    """The link over which `ranks` ranks took these times."""
    measured = np.array([each.seconds for each in times])
    if len(times) < len(UNITS) or not (np.isfinite(measured) & (measured > 0)).all():
        raise CannotFit("expected at least three all-reduces, each with a time above 0")
    model = np.array([[_predicted(each, ranks, unit) for unit in UNITS] for each in times])
    constants = _least_squares(model, measured, 1 / measured)
    for _ in range(ROUNDS):
        # Weighed so that the sum of squares becomes that of |log(predicted / measured)|: twice as long is as wrong as
        # half as long, and a time that was disturbed pulls no harder than the others.
        predicted = model @ constants
        off = np.abs(np.log(predicted / measured))
        constants = _least_squares(model, measured, 1 / np.sqrt(predicted * measured * np.maximum(off, NEAR)))
    error = float(np.median(np.abs(model @ constants / measured - 1)))
    return Fit(LinkTimes(*(float(value) for value in constants)), error)


def _predicted(timed: Timed, ranks: int, link: LinkTimes) -> float:
    return all_reduce_time(timed.algorithm, timed.nbytes, ranks, ranks, Network(inside=link, between=link))


def _least_squares(model: Array, measured: Array, weights: Array) -> Array:
    """The constants >= 0 that bring the model nearest: of every choice of those that are not 0, the best without a
    negative one."""
    rows, target = model * weights[:, None], measured * weights
    # Seconds a byte are a millionth of seconds a message: columns of one length keep the solution exact.
    scale = np.linalg.norm(rows, axis=0)
    best, nearest = None, np.inf
    # A message and a byte always cost something; reducing may be hidden behind moving.
    for chosen in ([0, 1], [0, 1, 2]):
        found = np.linalg.lstsq(rows[:, chosen] / scale[chosen], target, rcond=None)[0]
        constants = np.zeros(len(UNITS))
        constants[chosen] = found / scale[chosen]
        distance = float(np.sum((rows @ constants - target) ** 2))
        if (found > 0).all() and distance < nearest:
            best, nearest = constants, distance
    if best is None:
        raise CannotFit("the times grow neither with messages nor with bytes as those of a link would")
    return best
