"""Under which conditions both runs of a proof compute: in float64 all the way. What is drawn at random
is drawn by one rule (`runtime/draws.py`), dropout included.

The conditions hold around forward, loss, backward and the optimiser's step, in the serial run and on the ranks alike.
Jobs are loaded, models built and samples read outside them, as in any training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from shoal.job import Batch, Data, Job
from shoal.runtime.float64 import KeepFloat64


class Conditions:
    """Call it for a context; `modules` counts the modules that asked for float32 in it, by class name."""

    def __init__(self) -> None:
        self._kept = KeepFloat64()

    @property
    def modules(self) -> dict[str, int]:
        return self._kept.modules

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._kept:
            yield


def for_proof(job: Job) -> Job:
    """The job with data that are read outside the conditions."""
    return replace(job, train=_ReadOutside(job.train))


class _ReadOutside:
    """Data whose batches are those of training: what they narrow to float32 is rounded, in a proof as well."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: np.ndarray) -> Batch:
        with KeepFloat64.paused():
            return self._data.batch(indices)
