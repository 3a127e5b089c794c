"""The training loop, as every rank runs it: steps, evaluation, checkpoints, and rank 0's record of it all.

A stop (Ctrl-C, SIGTERM) reaches one rank first; it travels with the loss to the others, so that all stop
after the same step, write a checkpoint and end. Nothing of a run depends on when it was interrupted. Islands, which
average their models only now and then, do these things when they exchange (`pace.py`).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.buffers import average_buffers
from shoal.checkpoint.opening import open_checkpoint
from shoal.checkpoint.restore import restore
from shoal.comm.group import registered
from shoal.comm.json_exchange import exchange
from shoal.comm.ledger import BOOK, Ledger
from shoal.estimate.outer_calls import period
from shoal.job import Job
from shoal.job.large_batch import batch_at
from shoal.launch import sessions
from shoal.launch.devices import memory_limit_bytes, peak_memory_bytes
from shoal.launch.join import join, leave
from shoal.launch.watch import beat
from shoal.layout.held_outside import Outside
from shoal.layout.layout import facts_of, layout_of
from shoal.parallel.batch_norm import batch_norms
from shoal.parallel.result import NOTHING_COUNTED, NonFinite
from shoal.parallel.sync.streams import PHASE as OUTER
from shoal.proof.one_step import gate_here
from shoal.runtime.options import WrongOption
from shoal.runtime.servers import is_server
from shoal.runtime.setup import Prepared, job_from, prepare, staleness
from shoal.training.callbacks import Callbacks
from shoal.training.check import TrainingStopped, require_job_of, resume_point, warning
from shoal.training.folder import held_folder
from shoal.training.hindered import Hindered
from shoal.training.joining import Joining, Past, come, goes_on_from, in_session, strategy_of
from shoal.training.lost_islands import LostIslands, lost_ranks
from shoal.training.monitor import Monitor
from shoal.training.noise_scale import NoiseScale
from shoal.training.options import TrainOptions
from shoal.training.pace import Pace
from shoal.training.record.recorder import Recorder, new_folder, tracing
from shoal.training.record.run import RUN, Status
from shoal.training.resumed import can_go_on
from shoal.training.saving import Saving
from shoal.training.speed import speed_of
from shoal.training.step_split import StepSplit
from shoal.training.tickets import advance, leave_servers, serve_rank
from shoal.training.together import student_of


def train(options: TrainOptions, channel: Any) -> dict[str, Any]:
    """On every rank: a job under a strategy, from its start or from a checkpoint, to its end."""
    job, past = job_from(options), Past()
    if options.teachers is not None:
        job = student_of(job, options.of_job, options.teachers.split(", "))
    past.number = come(channel.rank)
    while True:
        outcome = _session(job, in_session(options, past.number), channel, past)
        if sessions.session(past.number + 1) is None:
            return outcome
        past.number += 1


def _session(job: Job, options: TrainOptions, channel: Any, past: Past) -> dict[str, Any]:
    """As long as its ranks are the same, but for those that are lost."""
    asked = options.backend
    me = join(backend=None if asked is None else registered(asked), emulate=options.emulate)
    strategy = strategy_of(options)
    if options.bucket_mb is not None and strategy.servers:
        raise WrongOption("--bucket-mb: servers lay out their parameters by themselves; leave it out")
    if options.gate and not strategy.servers:
        # The ranks have no parent process that could have done it.
        with Outside(job).kept():
            facts = facts_of(job, layout_of(job, strategy))
            gate_here(job, strategy, facts, me, channel, backend=asked)
    if (options.rejoin or options.join) and not channel.is_local:
        raise WrongOption(
            "--rejoin and --join: another launcher has started these ranks, and only it can start more; use --go-on "
            "with its restarts (torchrun --max-restarts)"
        )
    if options.folder is None:
        # Where no process could choose one for all ranks before, rank 0 does.
        chosen = {"folder": str(new_folder(Path("runs"), job.name)) if me.rank == 0 else None}
        options = replace(options, folder=exchange(chosen)[0]["folder"])
    folder = Path(options.folder or "")
    if options.go_on and options.resume is None and exchange({"found": can_go_on(folder)})[0]["found"]:
        options = replace(options, resume=str(folder))
    with held_folder(folder, options.lock, me.rank, channel):
        if is_server(strategy, me.rank):
            channel.allow_loss()
            served = serve_rank(job, strategy, me, Hindered(options, rank=me.rank, world=me.world, seed=job.seed))
            leave(lost={*lost_ranks(), *sessions.coming_to(past.number + 1)})
            return served
        bucket_bytes = None if options.bucket_mb is None else int(options.bucket_mb * 1e6)
        ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device, bucket_bytes=bucket_bytes)
        run = TrainingRun(ready, options, folder, channel, rank=me.rank, past=past)
        try:
            outcome = run.go()
        except BaseException as error:
            run.failed(error)
            raise
        finally:
            if run.runner.ahead is not None:
                run.runner.ahead.close()
        if run.joining.ends:
            ready.close()
        leave(lost=run.lost.ranks)
    return outcome


class TrainingRun:
    """One rank's run: its state, and what it has measured."""

    def __init__(
        self, ready: Prepared, options: TrainOptions, folder: Path, channel: Any, *, rank: int, past: Past | None = None
    ) -> None:
        """`past`: the sessions of this run before this one, if ranks came meanwhile."""
        past = past or Past()
        self.ready, self.options, self.folder, self.channel, self.rank = ready, options, folder, channel, rank
        self.job, self.engine, self.runner = ready.job, ready.engine, ready.runner
        self.engine.asked_to_stop = lambda: bool(channel.stop_requested)
        self.step, self.counter, self.train_s = 0, 0, 0.0
        self.step_times: list[float] = []
        self.ledger = Ledger()
        self.metrics: dict[str, float] = {}
        self.reached_s: float | None = None
        self.reached_step: int | None = None
        self.last_loss: float | None = None
        self.evaluated_step: int | None = None
        self.stopping = False
        self.ended: str | None = None
        """Why the run ends before its last step, other than by a signal or at its target."""
        self.monitor = Monitor(options, self.job)
        self.saving = Saving(self)
        self.callbacks = Callbacks(self)
        self.noise = NoiseScale()
        known = options.flops_per_sample if rank == 0 else None
        self.speed = speed_of(known, ready.strategy, ready.engine.device)
        self.pace = Pace(1 if ready.engine.owner.tickets is not None else period(ready.strategy))
        self.sent: deque[int] = deque(maxlen=self.pace.period)
        """Bytes of the last steps, a period of islands."""
        self.lost = LostIslands(ready, channel, rank=rank, past=past)
        self.joining = Joining(self, past)
        self.restored_s = 0.0
        """How long the checkpoint took to be read."""
        self.split = StepSplit(ready.runner)
        self.hindered = Hindered(options, rank=rank, world=ready.strategy.world, seed=self.job.seed)
        if options.resume is not None:
            began_s = time.perf_counter()
            self._resume(Path(options.resume))
            self.restored_s = time.perf_counter() - began_s
        self.recorder: Recorder | None = None
        if rank == 0:
            known = (self.folder / RUN).exists()  # One that was started and wrote no checkpoint begins again.
            self.recorder = Recorder(
                self.folder,
                job_name=self.job.name,
                strategy=str(ready.strategy),
                world=ready.strategy.world,
                seed=self.job.seed,
                arguments=options.recorded(),
                log=options.log,
                resumed_at=self.step if options.resume is not None or (options.starts_again and known) else None,
            )

    def _resume(self, path: Path) -> None:
        if self.options.checked:
            checkpoint = open_checkpoint(path, verify=False)  # By `check_run`, a moment ago.
        else:
            checkpoint = resume_point(path, warn=self.warn)
        require_job_of(checkpoint, self.job)
        progress, outer = checkpoint.progress, self.engine.outer
        if outer is not None:
            outer.goes_on_from = goes_on_from(self.joining.past.number, outer.islands.index)
        restore(self.engine, checkpoint)
        self.step, self.counter, self.train_s = checkpoint.step, progress["counter"], progress["train_s"]
        self.metrics, self.last_loss = dict(progress.get("metrics", {})), progress.get("loss")
        self.reached_s, self.reached_step = progress.get("reached_s"), progress.get("reached_step")
        self.saving.saved_step, self.evaluated_step = self.step, progress.get("evaluated_step")
        self.monitor = Monitor(self.options, self.job, progress.get("monitor"))
        if self.engine.scale_of_loss is not None:
            self.engine.scale_of_loss.load(progress.get("loss_scale"))
        # A scheduler's restart leaves a run that a callback has ended; patience is counted anew, or still exhausted.
        self.ended = progress.get("ended") if self.options.go_on else self.monitor.exhausted
        self.noise = NoiseScale(progress.get("noise", NoiseScale().state))

    def go(self) -> dict[str, Any]:
        job = self.job
        self.saving.prepare()
        trace = tracing(self.folder, steps=3) if self.rank == 0 and self.options.trace else None
        self.lost.allow()
        BOOK.take()
        self._evaluate_if_due()  # A stop comes before the evaluation of its step.
        self.joining.begin()
        if (ahead := self.options.prefetch or self.options.loader_processes) > 0:
            processes, threads = self.options.loader_processes, self.options.loader_threads
            self.runner.read_ahead(ahead, loaders=processes or threads, processes=processes > 0, counter=self.counter)
        while self.step < job.steps and not self._done():
            self._advance()
            if trace is not None:
                trace.step()
            if self.stopping:
                break
            self._evaluate_if_due()
            if self.step < job.steps and self.saving.after_step():
                self.end()
            if self.step < job.steps and not self._done() and self.joining.take_up():
                if trace is not None:
                    trace.close()
                return self._close("stopped")
        if trace is not None:
            trace.close()
        if self.stopping and self.step < job.steps:
            self.end(by_signal=True)
        self.runner.stop_reading()
        # A stop that comes with the last step has nothing left to stop.
        status: Status = "stopped" if self.stopping and self.step < job.steps and self.ended is None else "finished"
        if status == "finished" and self.evaluated_step != self.step:
            self._evaluate()
        self.saving.at_end()
        return self._close(status)

    def end(self, *, by_signal: bool = False) -> None:
        """All ranks learn why a callback has stopped the run; `by_signal`: if it was one."""
        said = exchange({"reason": self.callbacks.reason}, self.engine.placement.survivors)[0]["reason"]
        BOOK.take()
        self.ended = said if by_signal else said or "a callback asked for it"

    def _advance(self) -> None:
        """One step; where servers let replicas run at their own speed, tickets until all stand at one step again."""
        advance(self, self._one_step, self.saving.every)

    def _evaluate_if_due(self) -> None:
        due = self.pace.due(self.step, self.job.evaluate_every or 0)
        if due and 0 < self.step < self.job.steps and self.evaluated_step != self.step:
            self._evaluate()

    def _done(self) -> bool:
        return self.ended is not None or (self.reached_s is not None and self.options.stop_at_target)

    def _one_step(self) -> None:
        started = time.perf_counter()
        self.split.begin()
        self.hindered.before_step(self.step + 1)
        self.engine.stop_requested = self.callbacks.reason is not None  # A signal is read late in the step.
        lr_factor = self.job.lr_factor(self.step)
        self.lost.in_step = True
        try:
            result = self.runner.step(self.step, self.counter)
        except NonFinite as error:
            read = self.runner.read_outside(self.counter)
            raise self.no_number(self.step + 1, error.what, read) from error
        finally:
            self.lost.in_step = False
        self.hindered.after_step()
        self.split.end()
        seconds = time.perf_counter() - started
        samples = self.runner.order.next(self.counter) - self.counter
        if result.count:
            self.noise.add(result.noise, samples_per_count=samples / result.count)
        self.counter += samples
        self.step += 1
        self.train_s += seconds
        self.step_times.append(seconds)
        self.stopping = result.stop
        self.last_loss = result.loss
        counted = BOOK.take()
        # The first step also settles which ranks have gradients at all.
        self.ledger = counted.without("setup", "shapes", "agreement")
        self.sent.append(self.ledger.bytes)
        memory = peak_memory_bytes(self.engine.device)
        row = {
            "step": self.step,
            "samples": self.counter,
            "loss": result.loss,
            "count": result.count,
            "lr": self.engine.optimizer.rates.now(lr_factor),
            "lr_factor": lr_factor,
            "grad_norm": result.grad_norm,
            "step_s": seconds,
            "samples_per_s": samples / seconds,
            "memory_bytes": memory,
            "train_s": self.train_s,
            "sent_bytes": counted.bytes,
            "critical_batch": self.noise.critical_batch,
        }
        if self.engine.outer is not None:
            sent = sum(entry.bytes for key, entry in counted.entries.items() if key.phase == OUTER)
            self.engine.consistency.sent(sent, self.engine.outer.synchronous_bytes)
        if self.engine.scale_of_loss is not None:
            row |= {"loss_scale": self.engine.scale_of_loss.factor, "skipped": result.skipped}
        row |= self.engine.consistency.row() | self.speed.row(samples=samples, count=result.count, seconds=seconds)
        if self.recorder is not None:
            self.recorder.step(row, counted)
            self.channel.say({"event": "step", "steps": self.job.steps, **row})
            self.callbacks.step(row)

    def _evaluate(self) -> None:
        if self.job.validation is None:
            return
        self.settle()
        if self.job.batch_norm == "local" and batch_norms(self.engine.model):
            average_buffers(self.engine.model, self.engine.replicas.everyone)

        def evaluate() -> dict[str, float]:
            with self.engine.consensus():
                found = self.runner.evaluate(watch=beat)
            if self.engine.average is not None:
                with self.engine.average.in_place():
                    found |= {f"ema_{name}": value for name, value in self.runner.evaluate(watch=beat).items()}
            return found

        self.metrics = self.lost.together(evaluate)
        self.evaluated_step = self.step
        BOOK.take()
        target = self.job.target
        if target is not None and self.reached_s is None and target.reached(self.metrics[target.metric]):
            self.reached_s, self.reached_step = self.train_s, self.step
        if self.recorder is not None:
            self.recorder.metrics(self.step, self.metrics)
            self.channel.say({"event": "metrics", "step": self.step, "metrics": self.metrics})
        self.saving.wanted |= self.monitor.update(self.step, self.metrics)
        self.ended = self.ended or (self.monitor.exhausted if self.step < self.job.steps else None)
        if self.callbacks.evaluated() and self.step < self.job.steps:
            self.end()

    def progress(self) -> dict[str, Any]:
        """What a checkpoint keeps of the run besides the engine's state."""
        return {
            "job": self.job.name,
            "seed": self.job.seed,
            "counter": self.counter,
            "train_s": self.train_s,
            "strategy": str(self.ready.strategy),
            "metrics": self.metrics,
            "reached_s": self.reached_s,
            "reached_step": self.reached_step,
            "loss": self.last_loss,
            "evaluated_step": self.evaluated_step,
            "noise": self.noise.state,
            "ended": self.ended,
            **({"loss_scale": scale.to_json()} if (scale := self.engine.scale_of_loss) is not None else {}),
            **({"monitor": self.monitor.to_json()} if self.monitor.active else {}),
        }

    def settle(self) -> None:
        """What reads the parameters waits for updates that are still under way."""
        try:
            self.ready.executor.settle()
        except NonFinite as error:
            raise self.no_number(self.step, str(error)) from error

    def no_number(self, step: int, what: str, read_outside: Sequence[str] = ()) -> TrainingStopped:
        kept = "no checkpoint was written yet"
        if self.saving.saved_step is not None:
            kept = f"the checkpoint of step {self.saving.saved_step} is kept"
        advice = "A lower learning rate, clipping or another seed may help"
        if what.endswith(NOTHING_COUNTED):
            advice = "The loss counts nothing in this batch: return how many samples or tokens it sums"
        if read_outside:
            more = f" and {len(read_outside) - 1} more" if len(read_outside) > 1 else ""
            advice = (
                f"The cause: the model reads the parameter {read_outside[0]}{more} outside of the forward of the block "
                "that it belongs to, where zero=3 has not gathered it; read it inside, or train with zero=2"
            )
        return TrainingStopped(f"step {step}: {what}; {kept} in {self.folder}. {advice}")

    def warn(self, text: str) -> None:
        if self.rank == 0:
            self.channel.say(warning(text))

    def _close(self, status: Status) -> dict[str, Any]:
        self.settle()
        split = self.split.of_all(self.engine.placement.survivors)
        served = self.joining.past.add_served(leave_servers(self.engine, self.rank))
        steady = self.step_times[1:] or self.step_times
        outcome = {
            "status": status,
            "strategy": str(self.ready.strategy),
            "world": self.ready.strategy.world,
            "step": self.step,
            "steps": self.job.steps,
            "saved_step": self.saving.saved_step,
            "loss": self.last_loss,
            "metrics": self.metrics,
            "train_s": self.train_s,
            "ranks": split,
            "step_s": statistics.median(steady) if steady else None,
            "memory_bytes": peak_memory_bytes(self.engine.device),
            "steps_to_target": self.reached_step,
            "time_to_target_s": self.reached_s,
            "critical_batch": self.noise.critical_batch,
            "global_batch": self._batch_now(),
            "ledger": self.ledger.to_json(),
            "predicted": self.ready.predicted.to_json(),
            "sent_bytes": statistics.fmean(self.sent or [0]),
            "predicted_bytes": self.ready.predicted_bytes,
            "folder": str(self.folder),
            **self.speed.summary(),
            **self.lost.report(),
            **staleness(self.ready.executor),
            **served,
        }
        if offloading := self.engine.owner.offloading:
            outcome["offload"] = offloading.report()
        outer = self.engine.outer
        islands = outer.tickets.report() if outer is not None and outer.tickets is not None else {}
        if measured := self.engine.consistency.summary() | islands:
            outcome["consistency"] = measured
        if self.ended is not None:
            outcome["ended"] = self.ended
        if self.monitor.best:
            outcome["best"] = [{"step": step, self.monitor.metric: value} for value, step in self.monitor.best]
        if self.recorder is not None:
            self.recorder.close(status, outcome)
        return outcome

    def _batch_now(self) -> int:
        """The global batch that the run has grown to."""
        return batch_at(self.job.growth, self.job.global_batch, self.counter)

    def failed(self, error: BaseException) -> None:
        self.saving.give_up()
        if self.recorder is not None:
            self.recorder.close(
                "failed",
                {
                    "step": self.step,
                    "loss": self.last_loss,
                    "reason": str(error),
                    "samples": self.counter,
                    "memory_bytes": peak_memory_bytes(self.engine.device),
                    "memory_limit_bytes": memory_limit_bytes(),
                },
            )
