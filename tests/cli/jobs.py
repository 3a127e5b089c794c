"""Job files as a user would write them, small enough to train in a fraction of a second; and broken ones."""

from __future__ import annotations

from pathlib import Path

SMALL = """
import os
import torch
from torch import nn
from shoal.job import Job, TensorData

{before}

def data(seed):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(96, 8, generator=source)
    return TensorData(x=x, y=x @ torch.arange(8.0).unsqueeze(1))

def loss(output, batch):
{loss}
    return ((output - batch["y"]) ** 2).sum(), len(output)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, {hidden}), nn.Tanh(), nn.Linear({hidden}, 1))

    def forward(self, x):
{forward}
        return self.layers(x)

job = Job(
    name="{name}", model=Model, train=data(1), validation=data(2), loss=loss,
    optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.01), global_batch=24, steps={steps}, evaluate_every=4,
    clip={clip}, schedule=lambda step: {schedule},
)
"""


def write_job(
    folder: Path,
    *,
    name: str = "line",
    before: str = "",
    loss: str = "pass",
    forward: str = "pass",
    steps: int = 12,
    hidden: int = 16,
    clip: float | None = 1.0,
    schedule: str = "1.0",
) -> str:
    """Writes a job file and gives its name. `loss` and `forward` are lines that run first in these functions;
    `schedule` is an expression in `step`, which counts from 0.
    """
    text = SMALL.format(
        name=name,
        before=before,
        loss=_indented(loss, 4),
        forward=_indented(forward, 8),
        steps=steps,
        hidden=hidden,
        clip=clip,
        schedule=schedule,
    )
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return f"{name}.py"


def _indented(lines: str, by: int) -> str:
    return "\n".join(" " * by + line for line in lines.splitlines())
