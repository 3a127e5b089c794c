"""A job that evaluates often, for islands that meet rarely."""

from __future__ import annotations

import torch
from torch import nn

from shoal.job import Job, TensorData, cross_entropy


def _data(num: int, seed: int) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 8, generator=generator)
    return TensorData(x=x, y=torch.randint(0, 4, (num,), generator=generator))


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


job = Job(
    name="loose",
    model=_model,
    train=_data(240, 1),
    validation=_data(60, 2),
    loss=cross_entropy,
    optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    global_batch=12,
    steps=22,
    evaluate_every=3,
)
