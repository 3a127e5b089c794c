"""What the engine itself costs: steps of a model so small that hardly anything else is left of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.job import Job, TensorData
from shoal.job.losses import cross_entropy
from shoal.strategy import Strategy, parse
from shoal.train.setup import prepare
from shoal.train.step import build_model

WIDTH, LAYERS, SAMPLES = 16, 6, 64
MANY = 9
"""Micro-batches of the strategies that have several."""
STEPS = 4


def small_job() -> Job:
    """Linear layers one after the other; samples enough for every micro-batch."""
    draw = torch.Generator().manual_seed(0)
    data = TensorData(x=torch.randn(256, WIDTH, generator=draw), y=torch.randint(0, WIDTH, (256,), generator=draw))
    return Job(
        name="calibrate", model=_model, inputs=("x",), train=data, loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9), global_batch=SAMPLES, steps=10,
    )  # fmt: skip


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def measure_overheads(
    *, world: int, rank: int, backend: str | None, rounds: int, meet: Callable[[], None]
) -> dict[str, list[float]]:
    """On every rank: seconds of a step by kind, by round. Collective."""
    job = small_job()
    strategies = {
        "replicated": f"dp({world})",
        "accumulated": f"dp({world}) * accumulate({MANY})",
        "pipeline": f'pp({world}, "1f1b", micro={world})',
        "long pipeline": f'pp({world}, "1f1b", micro={world + MANY - 1})',
    }
    calls: dict[str, Callable[[], Any]] = {"plain": _plain(job, world)}
    for name, text in strategies.items():
        calls[name] = _engine(job, parse(text), rank, backend)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            call()
            meet()
            start_s = time.perf_counter()
            for _ in range(STEPS):
                call()
            if turn:
                found[name].append((time.perf_counter() - start_s) / STEPS)
    return found


def _engine(job: Job, strategy: Strategy, rank: int, backend: str | None) -> Callable[[], Any]:
    runner = prepare(job, strategy, rank=rank, backend=backend).runner
    return lambda: runner.step(0, 0)


def _plain(job: Job, world: int) -> Callable[[], Any]:
    """Forward and backward without an engine."""
    model = build_model(job)
    batch = job.train.batch(job.order().indices(0)[: SAMPLES // world])

    def step() -> None:
        loss, _ = job.loss(job.run_model(model, batch), batch)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step
