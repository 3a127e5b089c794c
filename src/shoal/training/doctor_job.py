"""A small mixture of experts: what `shoal doctor` trains where the built-in tasks have no experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.job import Job, TensorData


class Mixture(nn.Module):
    """Each sample goes to the one of four experts that its first features choose."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, choices = self.router(x).softmax(-1).topk(1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            sample, slot = torch.where(choices == number)
            if len(sample):
                answer = expert(x[sample]) * weights[sample, slot, None]
                mixed = mixed.index_add(0, sample, answer.to(mixed.dtype))
        return mixed


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The sum of squares against the samples themselves."""
    return (output - batch["x"]).square().sum(), len(output)


job = Job(
    name="experts",
    model=lambda: nn.Sequential(nn.Linear(16, 16), Mixture(), nn.Linear(16, 16)),
    train=TensorData(x=torch.randn(64, 16, generator=torch.Generator().manual_seed(0))),
    loss=loss,
    optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    global_batch=16,
    steps=10,
)
