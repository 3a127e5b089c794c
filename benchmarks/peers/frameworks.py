"""Frameworks by their adapters, as `shoal compare` drives them, for benchmarks that step several in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shoal.comm.ledger import BOOK
from shoal.comparison.adapter import Adapter, RankPlace
from shoal.comparison.rank import evaluate
from shoal.job import Job


class Framework:
    """A framework on this rank."""

    def __init__(self, adapter: Adapter, job: Job, me: Any, group: Any) -> None:
        self.job, self.counter = job, 0
        self.place = RankPlace(rank=me.rank, world=me.world, group=group)
        self.trainee = adapter.build(job, self.place)
        self.judge: Any = None

    def step(self, number: int) -> None:
        """Trains on the next global batch; steps are numbered from 0."""
        # What it sends is counted where its group counts.
        with BOOK.during("backward"):
            self.trainee.step(self.counter, self.job.lr_factor(number))
        self.counter = self.trainee.order.next(self.counter)

    def evaluate(self) -> dict[str, float]:
        """The validation values, the same on all ranks."""
        if self.judge is None:
            self.judge = self.job.model()
        return evaluate(self.job, self.trainee, self.judge, self.place)

    def close(self) -> None:
        self.trainee.close()
        del self.trainee


def stepper(adapter: Adapter, job: Job, me: Any, group: dist.ProcessGroup) -> Callable[[], None]:
    """What makes one step after the other, with the learning rate of the first."""
    runs = Framework(adapter, job, me, group)
    return lambda: runs.step(0)
