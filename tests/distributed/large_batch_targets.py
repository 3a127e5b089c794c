"""What the tests of large batches run on real ranks: gradients of known noise, and the samples that ranks fetch."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.checkpoint.restore import restore
from shoal.checkpoint.save import open_checkpoint, save
from shoal.job import Job, TensorData
from shoal.launch.join import join, leave
from shoal.runtime.setup import Prepared, prepare
from shoal.strategy import parse

DIMENSIONS, SPREAD, DISTANCE, SAMPLES = 30, 0.5, 0.2, 20_000


class Point(nn.Module):
    """The gradient of half the squared distance from a sample is the difference: its noise is that of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.full((DIMENSIONS // 2,), DISTANCE))
        self.outer = nn.Parameter(torch.full((DIMENSIONS // 2,), DISTANCE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner, self.outer]) - x


class Recorded:
    """Data that remember which samples were asked for, while `on`."""

    def __init__(self, data: TensorData) -> None:
        self.data, self.on = data, False
        self.fetched: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        if self.on:
            self.fetched.append([int(index) for index in indices])
        return self.data.batch(indices)


def point_job(*, samples: int = SAMPLES, lr: float = 0.0, **changes: Any) -> Job:
    generator = torch.Generator().manual_seed(5)
    x = SPREAD * torch.randn(samples, DIMENSIONS, generator=generator, dtype=torch.float64)
    given: dict[str, Any] = {
        "name": "point",
        "model": Point,
        "train": Recorded(TensorData(x=x)),
        "global_batch": 12,
        "steps": 400,
        "loss": lambda out, batch: (0.5 * out.square().sum(), len(out)),
        "optimizer": lambda groups: torch.optim.SGD(groups, lr=lr),
    }
    return Job(**(given | changes))


def _ready(me: Any, job: Job, strategy: str) -> Prepared:
    return prepare(job, parse(strategy), rank=me.rank, backend=me.backend, dtype=torch.float64)


def noise(arguments: dict[str, Any], channel: Any) -> dict[str, tuple[float, float] | None]:
    """For each strategy: mean noise and signal of many steps that stay where they are."""
    me, found = join(), {}
    for strategy in arguments["strategies"]:
        ready = _ready(me, point_job(), strategy)
        rows, counter = [], 0
        for step in range(arguments["steps"]):
            rows.append(ready.runner.step(step, counter).noise)
            counter = ready.runner.order.next(counter)
        seen = [row for row in rows if row is not None]
        assert len(seen) in (0, len(rows))
        found[strategy] = (fmean(row.noise for row in seen), fmean(row.signal for row in seen)) if seen else None
        assert ready.differences(_last_ledger(ready, counter)) == []
        ready.close()
    leave()
    return found


def _last_ledger(ready: Prepared, counter: int) -> Any:
    from shoal.comm.ledger import BOOK

    BOOK.take()
    ready.runner.step(0, counter)
    return BOOK.take().without("setup", "shapes", "agreement")


def fetch(arguments: dict[str, Any], channel: Any) -> list[list[list[int]]]:
    """Some steps from a checkpoint, or from the start, and a checkpoint. Gives what each step fetched on this rank."""
    me = join()
    job = point_job(lr=0.1, **arguments["job"])
    ready = _ready(me, job, arguments["strategy"])
    step, counter = 0, 0
    if arguments["resume"]:
        checkpoint = open_checkpoint(Path(arguments["resume"]))
        restore(ready.engine, checkpoint)
        step, counter = checkpoint.step, checkpoint.progress["counter"]
    found, data = [], job.train
    assert isinstance(data, Recorded)
    for _ in range(arguments["steps"]):
        data.fetched, data.on = [], True
        ready.runner.step(step, counter)
        data.on = False
        found.append(data.fetched)
        step, counter = step + 1, ready.runner.order.next(counter)
    save(Path(arguments["folder"]), ready.engine, step=step, progress={"counter": counter})
    ready.close()
    leave()
    return found
