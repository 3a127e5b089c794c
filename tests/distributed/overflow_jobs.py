"""A job whose gradients overflow in 16 bits at chosen places, and a plain loop with PyTorch's GradScaler.

A sample can make its gradient larger by 30,000, which no loss scale of these runs leaves in the range of fp16: in one
column of the first layer, or in the loss. So it is decided by the data which steps overflow, not by rounding, and the
overflow is first seen by one rank only: one replica, one stage, one part of a matrix.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal import load_run
from shoal.job import Job, TensorData
from shoal.parallel import loss_scale
from shoal.training.entry import train_run

STEPS, BATCH, GROW_AFTER, CLIP = 12, 8, 3, 0.5
AMPLIFIED = 30_000.0
IN_FIRST_LAYER = {3: 0, 9: 7}
"""Step (from 0): which of its samples has a steep gradient in the first layer."""
IN_LOSS = {5: 4, 10: 1}
"""Step: which of its samples has a steep loss."""


class First(nn.Module):
    """A linear layer whose first output has, for steep samples, the same value with a larger gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 16)
        self.register_buffer("column", torch.eye(16)[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x[:, :6])
        return h + x[:, 6:] * self.column * (h - h.detach())


def model() -> nn.Module:
    return nn.Sequential(First(), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    losses = nn.functional.cross_entropy(output.float(), batch["y"], reduction="none")
    return (losses * batch["weight"]).sum(), len(output)


def overflowing() -> Job:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS * BATCH, 6, generator=draw)
    made = Job(
        name="overflowing",
        model=model,
        train=TensorData(x=x),
        loss=loss_of,
        global_batch=BATCH,
        steps=STEPS,
        optimizer=lambda groups: torch.optim.Adam(groups, lr=0.01),
        clip=CLIP,
    )
    steep, weight = torch.zeros(len(x), 1), torch.ones(len(x))
    for step in range(STEPS):
        samples = made.order().indices(step * BATCH)
        if step in IN_FIRST_LAYER:
            steep[samples[IN_FIRST_LAYER[step]]] = AMPLIFIED
        if step in IN_LOSS:
            weight[samples[IN_LOSS[step]]] = AMPLIFIED * AMPLIFIED
    return replace(made, train=TensorData(x=torch.cat([x, steep], 1), y=x[:, :3].argmax(1), weight=weight))


def train_with_a_scale_that_grows_soon(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    loss_scale.GROW_AFTER = GROW_AFTER
    return train_run(arguments, channel)


@cache
def by_hand() -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What PyTorch's own scaler makes of the job in one process: a row for each step, and the weights at the end."""
    job = overflowing()
    torch.manual_seed(job.seed)
    trained = job.model()
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3)
    rows = []
    for step in range(STEPS):
        batch = job.train.batch(job.order().indices(step * BATCH))
        with torch.autocast("cpu", torch.float16):
            loss, count = loss_of(trained(batch["x"]), batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for parameter in trained.parameters():
            parameter.grad /= count
        norm = float(nn.utils.clip_grad_norm_(trained.parameters(), CLIP))
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        after = scaler.get_scale()
        rows.append({"loss": float(loss.detach()) / count, "norm": norm, "scale": after, "skipped": after < before})
    return rows, trained.state_dict()


def compare(folder: Path) -> None:
    """Asserts that a run skipped the same steps, had the same scale, and ended with the same weights."""
    rows, weights = by_hand()
    found = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in found] == [row["skipped"] for row in rows]
    assert [row["loss_scale"] for row in found] == [row["scale"] for row in rows]
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in rows], rel=1e-2)
    norms = [(row["grad_norm"], own["norm"]) for row, own in zip(found, rows, strict=True) if not own["skipped"]]
    assert [norm for norm, _ in norms] == pytest.approx([own for _, own in norms], rel=1e-2)
    trained = load_run(folder).model().state_dict()
    for name, values in weights.items():
        assert torch.allclose(trained[name], values, atol=2e-3), (name, (trained[name] - values).abs().max())
