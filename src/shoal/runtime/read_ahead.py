"""Batches of coming steps are read by threads or processes (`loader_processes.py`) while the current step computes.

The order of the data is a function of the sample counter, so what comes is known, and a batch that was read ahead is
the one that would have been read. With loading time L of a batch, n loaders, k batches ahead and computing time T of a
step, a step takes max(T, L / min(n, k)) instead of T + L.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from shoal.job.errors import JobError
from shoal.runtime.loader_processes import LoaderProcesses

Batch = dict[str, torch.Tensor]


class ReadAhead:
    """The data of a job, with batches that are expected read before they are asked for."""

    def __init__(self, data: Any, *, loaders: int, processes: bool = False) -> None:
        """`processes`: whether loaders are processes; if not, threads."""
        self.processes = LoaderProcesses(data, processes=loaders) if processes else None
        self.data = data if self.processes is None else self.processes
        # Each process is waited for by a thread.
        self._threads = ThreadPoolExecutor(max_workers=loaders, thread_name_prefix="reads ahead")
        self._coming: dict[bytes, Future[Batch]] = {}

    def batch(self, indices: np.ndarray) -> Batch:
        """The batch; waits if it is being read."""
        found = self._coming.pop(indices.tobytes(), None)
        return self.data.batch(indices) if found is None or found.cancelled() else found.result()

    def expect(self, coming: Sequence[np.ndarray]) -> None:
        """These batches come next, in this order; others that were expected do not."""
        wanted = {indices.tobytes(): indices for indices in coming}
        for key in [key for key in self._coming if key not in wanted]:
            self._coming.pop(key).cancel()
        for key, indices in wanted.items():
            if key not in self._coming:
                self._coming[key] = self._threads.submit(self.data.batch, indices)

    def close(self) -> None:
        """Reads no more; a batch that is being read is not waited for."""
        self._coming.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.processes is not None:
            self.processes.close()


def require_readable_ahead(data: Any, indices: np.ndarray) -> None:
    """Refuses data that draws from a generator of the process: a thread would change what dropout draws meanwhile."""
    before = _random_states()
    data.batch(indices)
    changed = [name for name, state in _random_states().items() if state != before[name]]
    if changed:
        raise JobError(
            f"--prefetch: reading a batch of {type(data).__name__} changes the global generator of {changed[0]}, which "
            "the training draws from; let batch() use a generator of its own, seeded by the index, or leave --prefetch "
            "out"
        )


def _random_states() -> dict[str, Any]:
    words = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": repr(words),
        "random": random.getstate(),
    }
