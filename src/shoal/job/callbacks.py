"""Callbacks: functions of one's own that training calls after a step, an evaluation and a checkpoint.

They run on rank 0, in the process that trains, between two steps; other ranks wait for rank 0 in the next collective.
They are given numbers, not the model, of which rank 0 may hold only a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.common.suggest import did_you_mean

EVENTS = ("on_step", "on_evaluate", "on_checkpoint")


@dataclass
class TrainingState:
    """What a callback is given."""

    step: int
    """Steps made."""
    steps: int
    """Steps of the full run."""
    samples: int
    """Samples seen."""
    folder: Path
    """The run's folder."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The step's row, as `steps.jsonl` has it: loss, lr, grad_norm, step_s, ..."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The validation values of the last evaluation."""
    checkpoint: Path | None = None
    """In `on_checkpoint`: the checkpoint that was completed."""
    reason: str | None = None
    """Why the run was asked to stop."""

    @property
    def loss(self) -> float | None:
        """The loss of the last step."""
        return self.row.get("loss")

    def stop(self, reason: str = "") -> None:
        """Asks the run to stop: it writes a checkpoint and ends with status "finished". From `on_evaluate` and
        `on_checkpoint` no further step is made; from `on_step` one, whose loss carries the request to all ranks."""
        self.reason = reason or "a callback asked for it"


class Callback:
    """The methods that a callback may have. Deriving from it is optional: any object with one of them will do.

    Example:
        class Diverged(shoal.Callback):
            def on_step(self, state):
                if state.loss > 20:
                    state.stop(f"the loss is {state.loss:.1f}")
    """

    def on_step(self, state: TrainingState) -> None:
        """After each step."""

    def on_evaluate(self, state: TrainingState) -> None:
        """After each evaluation: `state.metrics`."""

    def on_checkpoint(self, state: TrainingState) -> None:
        """After a checkpoint is complete: `state.checkpoint`."""


def wrong_callbacks(callbacks: Any) -> str:
    """What is wrong with a job's callbacks; empty if nothing is."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        return f"callbacks is {callbacks!r}, but must be a list or tuple of objects with {', '.join(EVENTS)}"
    for each in callbacks:
        if isinstance(each, type):
            return f"callbacks holds the class {each.__name__}; give an object of it: {each.__name__}()"
        strange = [name for name in dir(each) if name.startswith("on_") and name not in EVENTS]
        if strange:
            never = f"has {strange[0]}, which is never called{did_you_mean(strange[0], EVENTS)}"
            return f"the callback {type(each).__name__} {never}; there are {', '.join(EVENTS)}"
        if not any(callable(getattr(each, name, None)) for name in EVENTS):
            return f"callbacks holds {each!r}, which has none of {', '.join(EVENTS)}"
    return ""


def listening(callbacks: Sequence[Any], event: str) -> list[Any]:
    """The methods for an event, without those that `Callback` leaves empty."""
    found = [getattr(each, event, None) for each in callbacks]
    empty = getattr(Callback, event)
    return [method for method in found if method is not None and getattr(method, "__func__", None) is not empty]
