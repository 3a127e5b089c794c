"""The constants of a link from the times of all-reduces over it: the ones with which the model predicts them best.

The model (`comm/choice.py`) is linear in its three constants, so its own answers for unit constants are the rows of a
least-squares problem, and there is no second copy of its formulas to go astray. Errors are relative, since a choice
between two algorithms at a kilobyte matters as much as one at megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.comm.choice import all_reduce_time
from shoal.comm.network import LinkTimes, NetworkTimes

Array = NDArray[Any]
UNITS = (LinkTimes(1.0, 0.0, 0.0), LinkTimes(0.0, 1.0, 0.0), LinkTimes(0.0, 0.0, 1.0))
# Reducing a byte costs nothing on top of moving it, at most as much, or something in between. (At two ranks the two are
# hard to distinguish, and without bounds a little noise would give all of the time to one of them.)
BASES = (
    np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]),
    np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]),
    np.eye(3),
)
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
    constants = _first_guess(model, measured, np.array([each.nbytes for each in times]))
    for _ in range(ROUNDS):
        # Weighed so that the sum of squares becomes that of |log(predicted / measured)|: twice as long is as wrong as
        # half as long, and a time that was disturbed pulls no harder than the others.
        predicted = model @ constants
        off = np.abs(np.log(predicted / measured))
        nearer = _least_squares(model, measured, 1 / np.sqrt(predicted * measured * np.maximum(off, NEAR)))
        if nearer is None:
            break
        constants = nearer
    error = float(np.median(np.abs(model @ constants / measured - 1)))
    return Fit(LinkTimes(*(float(value) for value in constants)), error)


def _first_guess(model: Array, measured: Array, nbytes: Array) -> Array:
    """As if the smallest sizes were all latency, and the largest all bytes."""
    smallest, largest = nbytes == nbytes.min(), nbytes == nbytes.max()
    latency_s = np.median(measured[smallest] / model[smallest, 0])
    return np.array([latency_s, np.median(measured[largest] / model[largest, 1]), 0.0])


def _predicted(timed: Timed, ranks: int, link: LinkTimes) -> float:
    return all_reduce_time(timed.algorithm, timed.nbytes, ranks, ranks, NetworkTimes(inside=link, between=link))


def _least_squares(model: Array, measured: Array, weights: Array) -> Array | None:
    """The constants that bring the model nearest, of those a link can have; None if there are none such."""
    rows, target = model * weights[:, None], measured * weights
    best, nearest = None, np.inf
    for basis in BASES:
        columns = rows @ basis
        # Seconds a byte are a millionth of seconds a message: columns of one length keep the solution exact.
        scale = np.linalg.norm(columns, axis=0)
        constants = basis @ (np.linalg.lstsq(columns / scale, target, rcond=None)[0] / scale)
        latency_s, byte_s, reduce_byte_s = constants
        distance = float(np.sum((rows @ constants - target) ** 2))
        if latency_s > 0 and byte_s > 0 and 0 <= reduce_byte_s <= byte_s and distance < nearest:
            best, nearest = constants, distance
    return best
