"""A small residual network that every axis can split: what the tests of delays, kills and resumption train."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TensorData

WIDTH, CLASSES, SAMPLES = 12, 5, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    return F.cross_entropy(output, batch["y"], reduction="sum"), float(len(batch["y"]))


def job(**changes: Any) -> Job:
    draw = torch.Generator().manual_seed(3)
    data = TensorData(
        x=torch.randn(SAMPLES, 7, generator=draw), y=torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
    )
    settings = {"global_batch": 12, "steps": 400, "clip": 1.0, "validation": data, **changes}
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    return Job(name="residual", model=Residual, train=data, loss=loss, optimizer=optimizer, **settings)
