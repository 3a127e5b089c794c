"""The training loop, as every rank runs it: steps, evaluation, checkpoints, and a record of all of it by rank 0.

A stop (Ctrl-C, SIGTERM) reaches one rank first; it travels with the loss to the others, so that all stop after the
same step, write a checkpoint and end. Nothing of a run depends on when it was interrupted.
"""

from __future__ import annotations

import resource
import statistics
import time
from pathlib import Path
from typing import Any

from shoal.comm.group import BACKENDS, BOOK
from shoal.comm.ledger import Ledger
from shoal.estimate.traffic import predict
from shoal.parallel.batch_norm import batch_norms
from shoal.parallel.engine import NonFinite
from shoal.strategy import parse
from shoal.train.buffers import average_buffers
from shoal.train.checkpoint import CheckpointFailed, save
from shoal.train.join import join, leave
from shoal.train.record import Recorder, tracing
from shoal.train.restore import restore
from shoal.train.saved import open_checkpoint
from shoal.train.setup import Prepared, job_from, prepare


class TrainingStopped(ValueError):
    """Training cannot go on; the message says at which step and what is kept."""


def train_run(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank: a job under a strategy, from its start or from a checkpoint, to its end."""
    me = join(backend=BACKENDS.get(arguments.get("backend") or ""))
    job, strategy = job_from(arguments), parse(arguments["strategy"])
    ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device)
    run = TrainingRun(ready, arguments, channel, rank=me.rank)
    try:
        outcome = run.go()
    except BaseException as error:
        run.failed(error)
        raise
    leave()
    return outcome


class TrainingRun:
    """One rank's run: where it stands, and what it has measured."""

    def __init__(self, ready: Prepared, arguments: dict[str, Any], channel: Any, *, rank: int) -> None:
        self.ready, self.arguments, self.channel, self.rank = ready, arguments, channel, rank
        self.job, self.engine, self.runner = ready.job, ready.engine, ready.runner
        self.folder = Path(arguments["folder"])
        self.step, self.counter, self.train_s = 0, 0, 0.0
        self.step_times: list[float] = []
        self.ledger = Ledger()
        self.metrics: dict[str, float] = {}
        self.reached_s: float | None = None
        self.reached_step: int | None = None
        self.saved_step: int | None = None
        self.last_loss: float | None = None
        if arguments.get("resume"):
            self._resume(Path(arguments["resume"]))
        self.recorder: Recorder | None = None
        if rank == 0:
            self.recorder = Recorder(
                self.folder, job_name=self.job.name, strategy=str(ready.strategy), world=ready.strategy.world,
                seed=self.job.seed, arguments=arguments, resumed_at=self.step if arguments.get("resume") else None,
            )  # fmt: skip

    def _resume(self, path: Path) -> None:
        checkpoint = open_checkpoint(path)
        progress = checkpoint.progress
        if progress["job"] != self.job.name or progress["seed"] != self.job.seed:
            raise TrainingStopped(
                f"{path} is of job {progress['job']!r} with seed {progress['seed']}, but this is job {self.job.name!r} "
                f"with seed {self.job.seed}; resume with the job it was saved from"
            )
        restore(self.engine, checkpoint)
        self.step, self.counter, self.train_s = checkpoint.step, progress["counter"], progress["train_s"]
        self.metrics = dict(progress.get("metrics", {}))
        self.reached_s, self.reached_step = progress.get("reached_s"), progress.get("reached_step")
        self.saved_step = self.step

    def go(self) -> dict[str, Any]:
        job = self.job
        every = self.arguments.get("checkpoint_every") or 0
        status = "finished"
        trace = tracing(self.folder, steps=3) if self.rank == 0 and self.arguments.get("trace") else None
        while self.step < job.steps and not self._done():
            self._one_step()
            if trace is not None:
                trace.step()
            stop = self.stopping
            if job.evaluate_every and self.step % job.evaluate_every == 0 and self.step < job.steps and not stop:
                self._evaluate()
            if stop:
                status = "stopped"
                break
            if every and self.step % every == 0 and self.step < job.steps:
                self._save(final=False)
        if trace is not None:
            trace.close()
        if status == "finished" and (self.step >= job.steps or not self.metrics):
            self._evaluate()
        if every and self.saved_step != self.step:
            self._save(final=True)
        return self._close(status)

    def _done(self) -> bool:
        return self.reached_s is not None and bool(self.arguments.get("stop_at_target", True))

    def _one_step(self) -> None:
        started = time.perf_counter()
        self.engine.stop_requested = bool(self.channel.stop_requested)
        lr_factor = self.job.schedule(self.step)
        try:
            result = self.runner.step(self.step, self.counter)
        except NonFinite as error:
            kept = f"the checkpoint of step {self.saved_step} is kept" if self.saved_step is not None else "no checkpoint was written yet"
            raise TrainingStopped(
                f"step {self.step + 1}: {error}; {kept} in {self.folder}. A lower learning rate, clipping or another seed may help"
            ) from error
        seconds = time.perf_counter() - started
        samples = self.runner.order.next(self.counter) - self.counter
        self.counter += samples
        self.step += 1
        self.train_s += seconds
        self.step_times.append(seconds)
        self.stopping = result.stop
        self.last_loss = result.loss
        counted = BOOK.take()
        if len(self.step_times) != 1:
            self.ledger = counted
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        row = {
            "step": self.step, "samples": self.counter, "loss": result.loss, "count": result.count, "lr_factor": lr_factor,
            "grad_norm": result.grad_norm, "step_s": seconds, "samples_per_s": samples / seconds, "memory_bytes": memory,
            "train_s": self.train_s, "sent_bytes": counted.bytes,
        }  # fmt: skip
        if self.recorder is not None:
            self.recorder.step(row, counted)
            self.channel.say({"event": "step", "steps": self.job.steps, **row})

    def _evaluate(self) -> None:
        if self.job.validation is None:
            return
        self.channel.say({"event": "evaluating"}) if self.rank == 0 else None
        if self.job.batch_norm == "local" and batch_norms(self.engine.model):
            average_buffers(self.engine.model, self.engine.replicas.everyone)
        self.metrics = self.runner.evaluate()
        BOOK.take()
        target = self.job.target
        if target is not None and self.reached_s is None and target.reached(self.metrics[target.metric]):
            self.reached_s, self.reached_step = self.train_s, self.step
        if self.recorder is not None:
            self.recorder.metrics(self.step, self.metrics)
            self.channel.say({"event": "metrics", "step": self.step, "metrics": self.metrics, "reached_s": self.reached_s})

    def _save(self, *, final: bool) -> None:
        progress = {
            "job": self.job.name, "seed": self.job.seed, "counter": self.counter, "train_s": self.train_s,
            "strategy": str(self.ready.strategy), "metrics": self.metrics, "reached_s": self.reached_s,
            "reached_step": self.reached_step, "loss": self.last_loss,
        }  # fmt: skip
        try:
            path = save(self.folder / "checkpoints", self.engine, step=self.step, progress=progress)
        except CheckpointFailed as error:
            # Half a run is worth more than none: training goes on and tries again, unless this was the last chance.
            if final:
                raise
            if self.rank == 0:
                self.channel.say({"event": "warning", "text": f"{error}; training goes on"})
            return
        finally:
            BOOK.take()
        self.saved_step = self.step
        if self.rank == 0:
            self.channel.say({"event": "checkpoint", "step": self.step, "path": str(path)})

    def _close(self, status: str) -> dict[str, Any]:
        steady = self.step_times[1:] or self.step_times
        outcome = {
            "status": status, "step": self.step, "steps": self.job.steps, "loss": self.last_loss, "metrics": self.metrics,
            "train_s": self.train_s, "step_s": statistics.median(steady) if steady else None,
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "steps_to_target": self.reached_step, "time_to_target_s": self.reached_s,
            "ledger": self.ledger.to_json(), "predicted": predict(self.ready.table).to_json(), "folder": str(self.folder),
        }  # fmt: skip
        if self.recorder is not None:
            self.recorder.close(status, outcome)
        return outcome

    def failed(self, error: BaseException) -> None:
        if self.recorder is not None:
            self.recorder.close("failed", {"step": self.step, "loss": self.last_loss, "reason": str(error)})
