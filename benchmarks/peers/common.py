"""What all contestants share: the job, its batches, and a step that gives back the mean loss of the global batch (None
on a rank that does not know it), so that loops can be held against each other before they are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comparison.adapter import optimizer_of
from shoal.job import Job, TextData, load_job
from shoal.job.data.text import standard_library
from shoal.job.models.gpt import GPT, GPTConfig
from shoal.job.schedule import constant
from shoal.runtime.setup import prepare
from shoal.strategy import parse

Step = Callable[[], float | None]
Contestants = dict[str, Callable[[], Step]]
"""Name -> what builds it. Built one after the other, so that no two are set up at once."""

LIMIT = "no communication"
__all__ = [
    "LIMIT",
    "Contestants",
    "Step",
    "batches",
    "clip_by",
    "gpt_job",
    "gradients",
    "optimizer_of",
    "shoal_runner",
    "shoal_step",
    "squares",
    "sum_over",
    "text_of",
]


def gpt_job(size: str, *, batch: int, **changes: Any) -> Job:
    """The built-in language task at a size, with another shape where `changes` of its GPTConfig say so. The learning
    rate is constant, as hand-written loops keep it here."""
    job = load_job(f"language:{size}")
    job = replace(job, global_batch=batch, schedule=constant)
    if not changes:
        return job
    config = replace(job.model().config, **changes)
    return replace(job, model=partial(GPT, config), train=text_of(config))


def text_of(config: GPTConfig) -> TextData:
    return TextData(standard_library("train"), sequence=config.sequence)


def batches(job: Job) -> Iterator[dict[str, Tensor]]:
    """Global batches, in the order in which every strategy sees them."""
    order, counter = job.order(), 0
    while True:
        yield job.train.batch(order.indices(counter))
        counter = order.next(counter)


def shoal_runner(job: Job, text: str, me: Any) -> tuple[Any, Step]:
    """A strategy, ready to step: (its StepRunner, a step)."""
    runner = prepare(job, parse(text), rank=me.rank, backend=me.backend).runner
    order, state = job.order(), {"counter": 0}

    def step() -> float:
        result = runner.step(0, state["counter"])
        state["counter"] = order.next(state["counter"])
        return float(result.loss)

    return runner, step


def shoal_step(job: Job, text: str, me: Any) -> Step:
    return shoal_runner(job, text, me)[1]


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in parameters if param.grad is not None]


def squares(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The squared norm of the gradients, in one fused pass."""
    found = gradients(parameters)
    return torch.nn.utils.get_total_norm(found).square() if found else torch.zeros(())


def clip_by(parameters: Iterable[nn.Parameter], norm: Tensor, most: float | None) -> None:
    if most is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)


def sum_over(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(value, group=group)
    return value
