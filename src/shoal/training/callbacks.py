"""A job's callbacks in the training loop: called on rank 0, heard by all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.comm.json_exchange import exchange
from shoal.comm.ledger import BOOK
from shoal.job.callbacks import EVENTS, TrainingState, listening

if TYPE_CHECKING:
    from shoal.training.loop import TrainingRun


class Callbacks:
    """Those of one run."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        found = {event: listening(run.job.callbacks, event) for event in EVENTS}
        self.evaluates, self.saves = bool(found["on_evaluate"]), bool(found["on_checkpoint"])
        self._of = found if run.rank == 0 else {}
        self._row: Mapping[str, Any] = {}
        self.reason: str | None = None
        """On rank 0: why the run was asked to stop."""

    def step(self, row: Mapping[str, Any]) -> None:
        """After a step. A request to stop travels with the next step's loss."""
        if self._of.get("on_step"):
            self._row = row
            self._call("on_step")

    def evaluated(self) -> bool:
        """After an evaluation; whether to stop now. All ranks call it alike."""
        return self.evaluates and self._agreed("on_evaluate", None)

    def saved(self, path: Path) -> bool:
        """After a checkpoint; whether to stop now. All ranks call it alike."""
        return self.saves and self._agreed("on_checkpoint", path)

    def saved_in_background(self, path: Path) -> None:
        """On rank 0, when a thread has completed a checkpoint. A request to stop travels with the next loss."""
        if self._of.get("on_checkpoint"):
            self._call("on_checkpoint", path)

    def _agreed(self, event: str, path: Path | None) -> bool:
        if self._of:
            self._call(event, path)
        with BOOK.during("callbacks"):
            stop = exchange({"stop": self.reason is not None}, self._run.engine.placement.survivors)[0]["stop"]
        BOOK.take()
        return bool(stop)

    def _call(self, event: str, path: Path | None = None) -> None:
        run = self._run
        for method in self._of[event]:
            state = TrainingState(
                step=run.step,
                steps=run.job.steps,
                samples=run.counter,
                folder=run.folder,
                row=self._row,
                metrics=dict(run.metrics),
                checkpoint=path,
            )
            method(state)
            self.reason = self.reason or state.reason
