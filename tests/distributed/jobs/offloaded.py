"""A deep, narrow model whose state is worth offloading, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.job import Job, TensorData


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def job_of(width: int = 48, depth: int = 8, batch: int = 256, **changes: Any) -> Job:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(2 * batch, width, generator=draw)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), *(Block(width) for _ in range(depth)), nn.Linear(width, 3))

    given: dict[str, Any] = {
        "name": "offloaded",
        "model": model,
        "train": TensorData(x=x, y=x[:, :3].argmax(1)),
        "loss": loss_of,
        "inputs": ("x",),
        "optimizer": adamw,
        "global_batch": batch,
        "steps": 4,
        "clip": 0.05,
    }
    return Job(**(given | changes))


def loss_of(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(output, batch["y"], reduction="sum"), len(output)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=3e-3, amsgrad=True)


JOB = job_of()
sgd = job_of(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.05))
momentum = job_of(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9))
small = job_of(width=6, depth=4, batch=8)
shallow = job_of(depth=0)
large_activations = job_of(batch=2048, depth=12)


class Counting(torch.optim.Optimizer):
    """Steps by how often it was called: what it does depends on steps being of all parameters."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1, "times": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["times"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                    param -= group["lr"] / group["times"] * self.state[param]["sum"]


counting = job_of(optimizer=Counting)


class Lamb(torch.optim.Optimizer):
    """Needs full parameters: scales each update by the norm of its parameter."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param.grad, 0.1)
                    param -= group["lr"] * mean * param.norm() / (mean.norm() + 1e-6)


lamb = job_of(optimizer=Lamb)
