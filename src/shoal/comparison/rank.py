"""What ranks run in a comparison: one contestant, one job, one seed. Every contestant leaves the folder of a run.

A framework is stepped by `run_framework`, the same loop for all: its clock is around the step alone, data included;
evaluation is made on a plain copy of the model, by the protocol. A strategy of Shoal is trained as `shoal train` does.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shoal.comparison.adapter import Adapter, RankPlace, Trainee
from shoal.comparison.adapters import adapter_of
from shoal.comparison.watch import hashed, start_watching, watched
from shoal.job import Job, load_job, share
from shoal.job.load import named
from shoal.launch.join import join, leave
from shoal.launch.watch import beat
from shoal.layout.held_outside import Outside
from shoal.runtime.step import build_model
from shoal.training.options import TrainOptions
from shoal.training.record.recorder import Recorder
from shoal.training.record.run import RUN, read_json, write_json

LINK_BYTES, LINK_TIMES = 1 << 20, 5
SAY_S = 0.5
"""Between two messages of progress."""


def job_of(settings: Mapping[str, Any]) -> Job:
    """The job with what a comparison changes of it, the same for all contestants."""
    job = load_job(settings["job"], size=settings.get("size"))
    changes = {name: value for name, value in settings["changes"].items() if value is not None}
    # Callbacks are called in Shoal's loop only, where they may also end a run.
    return replace(job, callbacks=(), **changes)


def run_shoal(settings: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank: a strategy of Shoal."""
    from shoal.training.check import check
    from shoal.training.loop import train

    job = watched(job_of(settings), losses=False)
    options = TrainOptions(
        job=named(job),
        strategy=settings["contestant"],
        folder=settings["folder"],
        checkpoint_every=0,
        gate=False,
        stop_at_target=False,
        emulate=settings["emulate"],
        prefetch=0,
    )
    check(options, None)
    me = join(emulate=options.emulate)
    link, load = measure_link(me.world), machine_load()
    touch_libraries(job)
    watch = start_watching()
    train(options, channel)
    if me.rank == 0:
        _name_job(Path(settings["folder"]), settings)
    return {**watch.facts(), "link": link, "load": load, "threads": _threads()}


def touch_libraries(job: Job) -> None:
    """Two samples once forward, backward and through the optimiser, by a model of its own: what libraries hold from
    their first use on is no contestant's memory, whoever uses them first."""
    with Outside(job).kept(), torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        model = build_model(job)
        batch = job.train.batch(job.order().indices(0)[:2])
        total, count = job.loss_of(job.run_model(model, batch), batch)
        (total / count).backward()
        job.optimizer([{"params": [each for each in model.parameters() if each.requires_grad]}]).step()


def _name_job(folder: Path, settings: Mapping[str, Any]) -> None:
    """The record names the job that was asked for, with what was changed: `shoal explain` loads it again."""
    facts = read_json(folder / RUN)
    kept = {name: value for name, value in settings["changes"].items() if name in facts["arguments"]}
    write_json(folder / RUN, {**facts, "arguments": {**facts["arguments"], "job": settings["job"], **kept}})


def run_framework(settings: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank: a framework, by its adapter."""
    adapter = adapter_of(settings["contestant"])
    warnings.simplefilter("ignore", FutureWarning)  # Frameworks use what PyTorch is about to rename.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed's, which would be guessed with a warning.
    os.environ.setdefault("MASTER_PORT", "29500")  # Frameworks look for it; the ranks have met already.
    for package in adapter.packages:
        __import__(package)
    me = join(backend="gloo")
    place = RankPlace(rank=me.rank, world=me.world, group=dist.group.WORLD)
    link, load = measure_link(me.world), machine_load()
    plain = job_of(settings)
    touch_libraries(plain)
    watch = start_watching()
    job = watched(plain, losses=True)
    run = FrameworkRun(plain, job, _built(adapter, job, place, settings), place, settings, channel)
    run.go()
    facts = {
        **watch.facts(),
        "link": link,
        "load": load,
        "start": run.start,
        "end": run.end,
        "threads": _threads(),
    }
    leave()
    return facts


def _built(adapter: Adapter, job: Job, place: RankPlace, settings: Mapping[str, Any]) -> Trainee:
    shares = settings.get("shares", 1)
    return adapter.build(job, place, shares=shares) if adapter.single else adapter.build(job, place)  # type: ignore[call-arg]


class FrameworkRun:
    """One rank's run of a framework."""

    def __init__(
        self, plain: Job, job: Job, trainee: Trainee, place: RankPlace, settings: Mapping[str, Any], channel: Any
    ) -> None:
        """`plain`: the job without the watch."""
        self.plain, self.job, self.trainee, self.place, self.channel = plain, job, trainee, place, channel
        self.rows: list[dict[str, Any]] = []
        self.train_s, self.flushed = 0.0, 0
        self.judge: nn.Module | None = None
        self.metrics: dict[str, float] = {}
        self.recorder: Recorder | None = None
        if place.rank == 0:
            self.recorder = Recorder(
                Path(settings["folder"]),
                job_name=plain.name,
                strategy=settings["contestant"],
                world=place.world,
                seed=plain.seed,
                arguments={"job": settings["job"], **settings["changes"]},
                contract="",
            )
        self.start = hashed(trainee.parameters())
        self.end: dict[str, list[str]] = {}

    def go(self) -> None:
        try:
            self._go()
        except BaseException as error:
            if self.recorder is not None:
                self.recorder.close("failed", {"reason": str(error)})
            raise

    def _go(self) -> None:
        order, counter, job = self.job.order(), 0, self.job
        said = 0.0
        dist.barrier(group=self.place.group)
        for step in range(job.steps):
            if self.channel.stop_requested:
                raise KeyboardInterrupt
            started = time.perf_counter()
            self.trainee.step(counter, job.lr_factor(step))
            seconds = time.perf_counter() - started
            following = order.next(counter)
            samples, counter = following - counter, following
            self.train_s += seconds
            self.rows.append(
                {
                    "step": step + 1,
                    "samples": counter,
                    "step_s": seconds,
                    "samples_per_s": samples / seconds,
                    "train_s": self.train_s,
                }
            )
            beat()
            if self.place.rank == 0 and time.monotonic() - said > SAY_S:
                said = time.monotonic()
                self.channel.say({"event": "step", "step": step + 1, "steps": job.steps})
            last = step + 1 == job.steps
            if last or (job.evaluate_every and (step + 1) % job.evaluate_every == 0):
                self._flush()
                self._evaluate(step + 1)
        self.end = hashed(self.trainee.parameters())
        self.trainee.close()
        if self.recorder is not None:
            steady = [row["step_s"] for row in self.rows[1:]] or [row["step_s"] for row in self.rows]
            outcome = {
                "step": job.steps,
                "steps": job.steps,
                "train_s": self.train_s,
                "metrics": self.metrics,
                "step_s": statistics.median(steady) if steady else None,
            }
            self.recorder.close("finished", outcome)

    def _flush(self) -> None:
        """Losses of the steps since the last evaluation, over all ranks, and their rows."""
        from shoal.comparison import watch

        rows = self.rows[self.flushed :]
        sums = torch.zeros(len(rows), 2, dtype=torch.float64)
        for place, row in enumerate(rows):
            for total, count in watch.WATCH.losses.pop(row["step"] - 1, []):
                sums[place] += torch.tensor([float(total), float(count)], dtype=torch.float64)
        dist.all_reduce(sums, group=self.place.group)
        self.flushed = len(self.rows)
        if self.recorder is None:
            return
        for row, (total, count) in zip(rows, sums.tolist(), strict=True):
            self.recorder.step({**row, "loss": total / count if count else None, "count": count})

    def _evaluate(self, step: int) -> None:
        if self.plain.validation is None:
            return
        watch_peak()
        if self.judge is None:
            self.judge = self.plain.model()
        self.metrics = evaluate(self.plain, self.trainee, self.judge, self.place)
        if self.recorder is not None:
            self.recorder.metrics(step, self.metrics)


def watch_peak() -> None:
    from shoal.comparison import watch

    watch.WATCH.note_peak()


@torch.no_grad()
def evaluate(job: Job, trainee: Trainee, model: nn.Module, place: RankPlace) -> dict[str, float]:
    """The validation values of what a framework has trained, on a plain model, shared among ranks. Buffers are the mean
    over ranks, as they are where Shoal evaluates."""
    values = dict(model.named_parameters())
    for name, value in trainee.parameters():
        values[name].copy_(value)
    buffers = dict(model.named_buffers())
    for name, value in trainee.buffers():
        mean = value.detach().clone()
        if mean.is_floating_point():
            dist.all_reduce(mean, group=place.group)
            mean /= place.world
        buffers[name].copy_(mean)
    model.eval()
    totals: dict[str, list[float]] = {}
    assert job.validation is not None
    for start in range(0, len(job.validation), job.global_batch):
        everyone = np.arange(start, min(start + job.global_batch, len(job.validation)))
        mine = share(everyone, rank=place.rank, ranks=place.world)
        batch = job.validation.batch(mine if len(mine) else everyone[:1])
        for name, (total, count) in job.measure(job.run_model(model, batch), batch).items():
            sums = totals.setdefault(name, [0.0, 0.0])
            if len(mine):
                sums[0] += float(total)
                sums[1] += float(count)
        beat()
    flat = torch.tensor(list(totals.values()), dtype=torch.float64)
    dist.all_reduce(flat, group=place.group)
    return job.summarise({name: (row[0], row[1]) for name, row in zip(totals, flat.tolist(), strict=True)})


def machine_load() -> float:
    """Processes that wanted a core in the last minute, for each core."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def measure_link(world: int) -> dict[str, float] | None:
    """The links as they are just before a run: bytes a second and latency of an all-reduce over all ranks."""
    if world == 1:
        return None
    found = {}
    for name, elements in (("latency_s", 1), ("large_s", LINK_BYTES // 4)):
        values, seconds = torch.zeros(elements), []
        for _ in range(LINK_TIMES):
            start = time.perf_counter()
            dist.all_reduce(values)
            seconds.append(time.perf_counter() - start)
        found[name] = min(seconds)
    return {"latency_s": found["latency_s"], "bytes_per_s": LINK_BYTES / found["large_s"]}


def _threads() -> int:
    return torch.get_num_threads()
