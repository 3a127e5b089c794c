"""One step of a job under an engine: fetch this rank's share, forward, backward, update. Also one evaluation.

What a rank computes in a step is a function of (seed, sample counter): the samples, and the random numbers that
dropout draws, which are seeded by the counter of a micro-batch's first sample. So a resumed run goes on to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.group import BOOK
from shoal.job import Batch, Job, share
from shoal.parallel.batch_norm import batch_norms
from shoal.parallel.engine import Engine, StepResult


def seed_at(seed: int, sample: int) -> int:
    """The random seed of the micro-batch whose first sample has this counter."""
    return int(np.random.SeedSequence([seed, sample]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def cast(batch: Batch, dtype: torch.dtype | None) -> Batch:
    """The batch with its floating-point entries in the model's precision."""
    if dtype is None:
        return batch
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


class StepRunner:
    """Runs a job's steps through an engine."""

    def __init__(
        self, job: Job, engine: Engine, *, micro_batches: int, autocast: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        self.job = job
        self.engine = engine
        self.order = job.order()
        self.micro_batches = micro_batches
        self.autocast = autocast
        self.dtype = dtype
        self.couples_samples = bool(batch_norms(engine.model))
        self.device = next(engine.model.parameters()).device

    def step(self, step: int, counter: int) -> StepResult:
        """Trains on the global batch that starts at `counter`."""
        job, engine = self.job, self.engine
        everyone = engine.replicas.everyone
        indices = self.order.indices(counter)
        positions = np.arange(len(indices))
        engine.model.train()
        for micro in range(self.micro_batches):
            mine = share(positions, rank=everyone.index, ranks=everyone.size, micro=micro, micros=self.micro_batches)
            first = int(mine[0]) if len(mine) else len(indices)
            torch.manual_seed(seed_at(job.seed, counter + first))
            loss, count = self._loss(indices[mine], indices)
            engine.backward(loss, count, last=micro == self.micro_batches - 1)
        return engine.step(job.schedule(step))

    def _loss(self, mine: np.ndarray, everyones: np.ndarray) -> tuple[torch.Tensor, Any]:
        # A rank without samples (the short batch at an epoch's end) still takes part in every collective. Batch norm
        # must not see a stand-in, so there it computes on nothing; elsewhere on one sample that counts for nothing.
        stand_in = not len(mine) and not self.couples_samples
        batch = self._fetch(self.job.train, everyones[:1] if stand_in else mine)
        with BOOK.during("forward"), self._precision():
            loss, count = self.job.loss(self.job.run_model(self.engine.model, batch), batch)
        return (loss * 0.0, 0.0) if stand_in else (loss, count)

    def _fetch(self, data: Any, indices: np.ndarray) -> Batch:
        batch = cast(data.batch(indices), self.dtype)
        return batch if self.device.type == "cpu" else {k: v.to(self.device) for k, v in batch.items()}

    def _precision(self) -> Any:
        # The cache would keep a copy of every weight for the whole forward, also of blocks that ZeRO-3 gave back.
        if not self.autocast:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def evaluate(self, watch: Callable[[], None] = lambda: None) -> dict[str, float]:
        """The job's validation values over the whole validation set, the same on every rank."""
        job, engine = self.job, self.engine
        if job.validation is None:
            return {}
        everyone = engine.replicas.everyone
        totals: dict[str, list[float]] = {}
        engine.model.eval()
        with BOOK.during("evaluate"), torch.no_grad(), self._precision():
            for start in range(0, len(job.validation), job.global_batch):
                batch_of_all = np.arange(start, min(start + job.global_batch, len(job.validation)))
                mine = share(batch_of_all, rank=everyone.index, ranks=everyone.size)
                # Every rank runs every batch: with ZeRO-3 a forward is a collective.
                batch = self._fetch(job.validation, mine if len(mine) else batch_of_all[:1])
                measured = job.measure(job.run_model(engine.model, batch), batch)
                for name, (total, count) in measured.items():
                    sums = totals.setdefault(name, [0.0, 0.0])
                    if len(mine):
                        sums[0] += float(total)
                        sums[1] += float(count)
                watch()
            names = list(totals)
            flat = torch.tensor([totals[name] for name in names], dtype=torch.float64, device=self.device)
            if everyone.group is not None:
                dist.all_reduce(flat, group=everyone.group)
        engine.model.train()
        return job.summarise({name: (row[0], row[1]) for name, row in zip(names, flat.tolist(), strict=True)})


def build_model(job: Job, dtype: torch.dtype | None = None) -> nn.Module:
    """The job's model with its seeded start: the same on every rank and in the serial run."""
    torch.manual_seed(job.seed)
    model = job.model()
    return model if dtype is None else model.to(dtype)
