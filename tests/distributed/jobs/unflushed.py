"""Jobs for a pipeline without flush: five blocks and a head, no clipping, a learning rate that changes every step.

A global batch of 24 divides into 2, 3, 4 and 6 micro-batches for 1 and 2 replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distributed.jobs.odd import WIDTH, Chain, Residual, Tied, TrustRatio, make, tokens, vectors
from distributed.watched_layer import WatchedLayer
from shoal.job import DecayMatrices, Job, TensorData
from shoal.job.losses import IGNORED


class Normed(nn.Module):
    """A block with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.up(x)))


class Paired(nn.Module):
    """A block whose two layers tp cuts by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Steep(Residual):
    """The slope of its root at zero is no number, though the root is one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.sqrt(torch.square(self.gain * x))


class Sometimes(Residual):
    """A block with a layer for rare samples: not every micro-batch has a gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rare = x[:, 0] > 1.6
        if rare.any():
            x = torch.where(rare[:, None], self.rare(x), x)
        return super().forward(x)


def ignoring(num: int = 96) -> TensorData:
    """Two in five targets do not count."""
    data = vectors(num)
    drawn = torch.rand(num, generator=torch.Generator().manual_seed(6))
    y = torch.where(drawn < 0.4, IGNORED, data.batch(torch.arange(num).numpy())["y"])
    return TensorData(x=data.batch(torch.arange(num).numpy())["x"], y=y)


def with_a_nan(num: int = 96) -> TensorData:
    """One sample is no number."""
    entries = vectors(num).batch(torch.arange(num).numpy())
    entries["x"][num // 2] = float("nan")
    return TensorData(**entries)


def with_a_zero(num: int = 96) -> TensorData:
    """One sample is nothing but zeros."""
    entries = vectors(num).batch(torch.arange(num).numpy())
    entries["x"][num // 2] = 0.0
    return TensorData(**entries)


def _job(make_block: Callable[[], nn.Module] = Residual, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "name": "unflushed",
        "train": vectors(96),
        "clip": None,
        "global_batch": 24,
        "steps": 6,
        "schedule": lambda step: 1 / (1 + 0.3 * step),
        "options": DecayMatrices(weight_decay=0.1),
    }
    return make(partial(Chain, 5, make_block), **(settings | changes))


SGD = partial(torch.optim.SGD, lr=0.1)
JOBS: dict[str, Callable[[], Job]] = {
    "adamw": _job,
    "momentum": lambda: _job(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "sgd": lambda: _job(optimizer=SGD),
    "trust": lambda: _job(optimizer=TrustRatio),
    "ignored": lambda: _job(train=ignoring()),
    # The second batch is of 2 samples: some micro-batches are empty on one rank, some on all.
    "short": lambda: _job(train=vectors(26), last_batch="short"),
    "norm": lambda: _job(Normed),
    "paired": lambda: _job(Paired),
    "sometimes": lambda: _job(Sometimes),
    "tied": lambda: make(Tied, train=tokens(), clip=None, global_batch=24),
    "watched": lambda: _job(partial(WatchedLayer, WIDTH)),
    "exploding": lambda: _job(train=with_a_nan()),
    "steep": lambda: _job(Steep, train=with_a_zero()),
    "clipped": lambda: _job(clip=0.3),
    "validated": lambda: _job(validation=vectors(24), evaluate_every=2, steps=8),
    "long": lambda: _job(steps=60, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
}


def __getattr__(name: str) -> Any:
    """`unflushed.py:name` is a job."""
    if name in JOBS:
        return JOBS[name]
    raise AttributeError(name)
