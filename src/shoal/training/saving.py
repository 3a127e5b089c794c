"""The checkpoints of a run: when they are written, which are kept, and what happens when one cannot be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shoal.checkpoint.background import Background
from shoal.checkpoint.save import CheckpointFailed, require_savable, save
from shoal.comm.json_exchange import exchange
from shoal.comm.ledger import BOOK
from shoal.training.pace import Pace

if TYPE_CHECKING:
    from shoal.comm.mesh import Members
    from shoal.training.loop import TrainingRun


class SharedTimer:
    """Whether a number of seconds has passed, by rank 0's clock. Ranks agree without asking at every step: rank 0 says
    after how many steps to ask again, half of what is left."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._started, self._ask_at = seconds, time.monotonic(), 0

    def due(self, step: int, step_s: float, pace: Pace, over: Members | None) -> bool:
        """After a step; all ranks call it alike. True begins a new period."""
        if step < self._ask_at or step % pace.period:
            return False
        left_s = self.seconds - (time.monotonic() - self._started)
        with BOOK.during("checkpoint"):
            first = exchange({"left_s": left_s, "ask_in": max(1, int(left_s / max(step_s, 1e-6) / 2))}, over)[0]
        BOOK.take()
        due = bool(first["left_s"] <= 0)
        if due:
            self._started = time.monotonic()
        self._ask_at = step + (1 if due else first["ask_in"])
        return due


class Saving:
    """When and how one run saves."""

    def __init__(self, run: TrainingRun) -> None:
        options = run.options
        self.run, self.every = run, options.checkpoint_every or 0
        self.keep, self.weights_only = options.keep, options.weights_only
        self.timer = SharedTimer(60 * options.checkpoint_minutes) if options.checkpoint_minutes else None
        self.background = Background() if options.checkpoint_async else None
        self.regular = bool(self.every or self.timer)
        """Whether checkpoints are written for the sake of going on, not only the best ones."""
        self.saved_step: int | None = None
        self.wanted = False
        """Whether an evaluation was among the best."""
        self._unannounced: Path | None = None

    def prepare(self) -> None:
        """Refuses a job that cannot be saved, before its first step."""
        if self.regular or self.run.monitor.keep_best:
            require_savable(self.run.engine, self.run.ready.optimizer)

    def after_step(self) -> bool:
        """After a step and its evaluation, if there was one: saves if that is due. Whether a callback wants a stop."""
        run, due = self.run, self.wanted
        if self.timer is not None:
            due |= self.timer.due(run.step, run.step_times[-1], run.pace, run.engine.placement.survivors)
        self._announce()
        stop = False
        if due or run.pace.due(run.step, self.every):
            stop |= self.save(final=False)
        return stop

    def at_end(self) -> bool:
        """After the last step."""
        self.settle()
        due = self.saved_step != self.run.step and (self.regular or self.wanted)
        return self.save(final=True) if due else False

    def save(self, *, final: bool) -> bool:
        """Writes a checkpoint of the current step; whether a callback wants a stop."""
        run = self.run
        self.settle()
        run.settle()
        self.wanted = False
        background, stop = None if final else self.background, False

        def write() -> Path:
            self._require_finite()
            return save(
                run.folder / "checkpoints",
                run.engine,
                step=run.step,
                progress=run.progress(),
                keep=self.keep,
                protect=run.monitor.protected,
                weights_only=self.weights_only,
                background=background,
            )

        try:
            path = run.lost.together(write)
        except CheckpointFailed as error:
            self._failed(error, final=final)
            return stop
        finally:
            BOOK.take()
        if background is not None:
            self._unannounced = path
            return stop
        self.saved_step = run.step
        self._say(path)
        return stop | run.callbacks.saved(path)

    def settle(self) -> None:
        """Waits for a checkpoint that is being written."""
        if self.background is None:
            return
        try:
            step = self.background.wait()
        except CheckpointFailed as error:
            self._unannounced = None
            self._failed(error, final=False)
            return
        finally:
            BOOK.take()
        if step is not None:
            self.saved_step = step
            self._announce(complete=True)

    def give_up(self) -> None:
        """Where the run fails."""
        if self.background is not None:
            self.background.give_up()

    def _announce(self, *, complete: bool = False) -> None:
        """On rank 0: reports a checkpoint that a thread has completed."""
        path, thread = self._unannounced, self.background
        if path is None or thread is None or self.run.rank or not (complete or thread.succeeded):
            return
        self._unannounced = None
        self._say(path)
        self.run.callbacks.saved_in_background(path)

    def _say(self, path: Path) -> None:
        if self.run.rank == 0:
            step = int(path.name.removeprefix("step-"))
            self.run.channel.say({"event": "checkpoint", "step": step, "path": str(path)})

    def _failed(self, error: CheckpointFailed, *, final: bool) -> None:
        # Half a run is worth more than none: training goes on and tries again, if there is a next time.
        if final:
            raise error
        self.run.warn(f"{str(error).rstrip('.')}; training goes on")

    def _require_finite(self) -> None:
        """A checkpoint that cannot be trained on must not take the place of one that can."""
        run = self.run
        pieces = run.engine.owner.parameters()
        mine = next((piece.name for piece in pieces if not bool(torch.isfinite(piece.values).all())), None)
        with BOOK.during("checkpoint"):
            reports = exchange({"name": mine}, run.engine.placement.survivors)
        lost = [report["name"] for report in reports if report["name"] is not None]
        if lost:
            raise run.no_number(run.step, f"the parameter {lost[0]} is no longer finite")
