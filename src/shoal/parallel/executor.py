"""Executors: how the micro-batches of a step become gradients, and gradients an update.

A training loop hands an executor the micro-batches of a step; the executor runs them through the engine and gives the
step's figures back. Calls go one way: trainer -> executor -> engine. `PlainExecutor` runs one micro-batch after the
other; `pipeline/executor.py` runs those of a model in stages, `pipeline/pipedream.py` without a flush.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from shoal.comm.mesh import Members
from shoal.parallel.engine import Engine
from shoal.parallel.result import StepResult


class MicroBatches(Protocol):
    """What a step computes, given by the trainer."""

    def __len__(self) -> int: ...

    def key(self, micro: int) -> Hashable:
        """Equal for micro-batches of equal shapes."""

    def forward(self, micro: int) -> Any:
        """Calls the model."""

    def loss(self, micro: int, output: Any) -> tuple[torch.Tensor, Any]:
        """(Sum of the losses, count)."""


class Executor(ABC):
    """Runs the steps of an engine."""

    first_steady_step = 1
    """The first step (from 0) whose ledger is that of every later one."""
    steps_in_flight = 1
    """Steps whose micro-batches may wait for their backward at a time."""
    holds_loss = True
    """Whether this rank computes the end of the model."""
    update_group: Members | None = None
    """Where stages update after every micro-batch: the ranks that work on this rank's stage."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @abstractmethod
    def step(self, micro_batches: MicroBatches, *, lr_factor: float) -> StepResult:
        """All micro-batches of a step, and its update."""

    @abstractmethod
    def evaluate(self, key: Hashable, forward: Callable[[], Any]) -> Any:
        """One batch through the model, forward only; its output where this rank holds the loss, None elsewhere."""

    def settle(self) -> None:
        """Waits for what is in flight between steps, before parameters are read. All ranks call it alike."""
        self.engine.owner.settle()

    def staleness(self) -> dict[int, int] | None:
        """Updates made between the forward and the backward of a micro-batch -> how many micro-batches; None where
        there are none by the schedule."""
        return None


class PlainExecutor(Executor):
    """One micro-batch after the other, through the full model."""

    def step(self, micro_batches: MicroBatches, *, lr_factor: float) -> StepResult:
        def compute() -> None:
            last = len(micro_batches) - 1
            for micro in range(len(micro_batches)):
                loss, count = micro_batches.loss(micro, micro_batches.forward(micro))
                self.engine.backward(loss, count, last=micro == last)

        compute()
        return self.engine.step(lr_factor, again=compute)

    def evaluate(self, key: Hashable, forward: Callable[[], Any]) -> Any:
        return forward()
