"""What the engine itself costs: steps of models so small that starting operators is all that is left of them.

Each kind of overhead is the difference between two ways to train the same thing: a pass of a micro-batch with what
causes it, and one without.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.job import Job, TensorData
from shoal.job.losses import cross_entropy
from shoal.job.models.gpt import GPT, GPTConfig
from shoal.runtime.setup import prepare
from shoal.runtime.step import build_model
from shoal.strategy import parse

LAYERS, HIDDEN, SEQUENCE, WORDS = 4, 32, 16, 64
NORMS = 8
MANY = 9
"""Micro-batches of the strategies that have several: what a pass costs is an eighth of what eight more add."""
STEPS = 3
COUNTS = {
    "passes": MANY - 1,
    # Of tensor parallelism in a pass: two in and two out of each block, embedding, head, and two of the loss.
    "crossings": 4 * LAYERS + 4,
    # Of ZeRO-3 in a pass: every block and the rest once gathered and once reduced, and gathered again all but the last
    # block and the rest (`estimate/traffic.py`).
    "gathers": 2 * (LAYERS + 1) + LAYERS - 1,
    "attentions": LAYERS,
    "norms": NORMS,
}
"""How often a pass of a micro-batch performs the operation being measured."""


def language(world: int) -> Job:
    """Blocks as transformers have them."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (256, SEQUENCE + 1), generator=draw)
    return Job(
        name="calibrate",
        model=partial(GPT, GPTConfig(vocab=WORDS, sequence=SEQUENCE, layers=LAYERS, heads=4, hidden=HIDDEN)),
        inputs=("x",),
        train=TensorData(x=tokens[:, :-1], y=tokens[:, 1:]),
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        global_batch=MANY * world,
        steps=10,
    )


def normed(world: int, *, batch_norm: str) -> Job:
    """Layers with batch norms between them."""
    draw = torch.Generator().manual_seed(0)
    return Job(
        name="calibrate norms",
        model=_normed,
        inputs=("x",),
        train=TensorData(x=torch.randn(256, HIDDEN, generator=draw), y=torch.zeros(256, dtype=torch.long)),
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        global_batch=2 * MANY * world,
        steps=10,
        batch_norm=batch_norm,  # type: ignore[arg-type]
    )


def _normed() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(NORMS):
        layers += [nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN)]
    return nn.Sequential(*layers)


def measure_overheads(
    *, world: int, rank: int, backend: str | None, rounds: int, meet: Callable[[], None]
) -> dict[str, list[float]]:
    """On every rank: seconds of a step by kind, by round. Collective."""
    job = language(world)
    many = f" * accumulate({MANY})"
    runs = {
        "replicated": (job, f"dp({world})"),
        "replicated, many": (job, f"dp({world}){many}"),
        "one memory": (job, f"dp({world}, via=shared())"),
        "sharded, many": (job, f"dp({world}, zero=3){many}"),
        "sharded": (job, f"dp({world}, zero=3)"),
        "tensor": (job, f"tp({world})"),
        "tensor, many": (job, f"tp({world}){many}"),
        "ring": (job, f"cp({world})"),
        "ring, many": (job, f"cp({world}){many}"),
        "pipeline": (job, f'pp({world}, "1f1b", micro={world})'),
        "pipeline, many": (job, f'pp({world}, "1f1b", micro={world + MANY - 1})'),
        **{
            f"{kind} norms{more and ', many'}": (normed(world, batch_norm=kind), f"dp({world}){more}")
            for kind in ("sync", "local")
            for more in ("", many)
        },
    }
    calls: dict[str, Callable[[], Any]] = {"plain": _plain(job)}
    for name, (each, text) in runs.items():
        strategy = parse(text)
        if not LAYERS % world or name not in ("tensor", "tensor, many"):
            runner = prepare(each, strategy, rank=rank, backend=backend).runner
            calls[name] = partial(runner.step, 0, 0)
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


def _plain(job: Job) -> Callable[[], Any]:
    """Forward and backward of one sample, without an engine."""
    model = build_model(job)
    batch = job.train.batch(job.order().indices(0)[:1])

    def step() -> None:
        loss, _ = job.loss(job.run_model(model, batch), batch)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step
