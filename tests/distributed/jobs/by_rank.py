"""A model that computes differently on every rank: no engine can make it train as the serial run does."""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import Tensor, nn

from shoal.job import Job, TensorData, cross_entropy


class ByRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + 0.1 * int(os.environ.get("RANK", "0")))


def job() -> Job:
    generator = torch.Generator().manual_seed(1)
    data = TensorData(x=torch.randn(24, 4, generator=generator), y=torch.randint(0, 3, (24,), generator=generator))
    return Job(
        name="by-rank",
        model=ByRank,
        train=data,
        loss=cross_entropy,
        global_batch=12,
        steps=4,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
