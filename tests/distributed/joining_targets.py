"""What the tests of ranks that come to a run under way run on real ranks: with faults planted in those that come."""

from __future__ import annotations

from typing import Any

import torch

from shoal.checkpoint import islands, restore
from shoal.job import Job
from shoal.launch import sessions
from shoal.runtime.step import StepRunner
from shoal.training.entry import train_run

MISSED = 6
"""Steps by which a planted newcomer is late."""


def _old_learning_rate() -> None:
    """It goes on with the learning rate of the step at which it was lost."""
    right = Job.lr_factor
    Job.lr_factor = lambda self, step: right(self, max(0, step - MISSED))  # type: ignore[method-assign]


def _old_place_in_the_data() -> None:
    """It learns from the samples that were due when it was lost."""
    right = StepRunner.step

    def late(self: StepRunner, step: int, counter: int, *more: Any, **named: Any) -> Any:
        return right(self, step, max(0, counter - 12 * MISSED), *more, **named)

    StepRunner.step = late  # type: ignore[method-assign]


def _no_momentum() -> None:
    """Its inner optimiser begins anew."""
    right = islands.load_island

    def without(engine: Any, saved: Any) -> None:
        right(engine, saved)
        for state in engine.optimizer.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    restore.load_island = without  # type: ignore[assignment]


FAULTS = {"rate": _old_learning_rate, "place": _old_place_in_the_data, "momentum": _no_momentum}


def train_with_newcomer(arguments: dict[str, Any], channel: Any) -> Any:
    """The training loop; a process that comes later has the planted fault, if one is named."""
    fault = arguments.pop("fault", None)
    if fault is not None and sessions.coming_since() is not None:
        FAULTS[fault]()
    return train_run(arguments, channel)
