"""What trains over a slow link: DDP by its adapter, with and without PyTorch's PowerSGD, and Shoal's strategies.

All have the same model, data order, optimiser, schedule, clipping and evaluation. The ranks either train one after the
other to the target, or step all of them in turn, a few steps at a time, so that whatever the machine does meets all.

    torchrun ... -m peers.slow_link SETTINGS.json      (or `ranks_do` on ranks that were started otherwise)
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from peers.frameworks import Framework
from shoal.comm.group import BACKENDS
from shoal.comm.ledger import BOOK
from shoal.comparison.adapters.torch_ddp import TorchDDP
from shoal.comparison.adapters.torch_ddp_powersgd import PowerSGD
from shoal.job import Job, load_job
from shoal.job.job import Target
from shoal.job.schedule import WarmupCosine
from shoal.launch.join import Rank, join, leave
from shoal.parallel.result import NonFinite
from shoal.parallel.runnable import require_runnable
from shoal.runtime.setup import prepare
from shoal.strategy import dgc, parse, require_legal

Say = Callable[[str], None]

DDP = "DDP"
COUNTERS_LAG_S = 0.05
"""What the kernel has taken leaves the host a moment later."""


class Contestant(Protocol):
    """Something that trains the job on two ranks."""

    def step(self, number: int) -> None:
        """Trains on the next global batch; steps are numbered from 0."""

    def evaluate(self) -> dict[str, float]:
        """The validation values, the same on both ranks."""

    def close(self) -> None: ...


class ByShoal:
    """A strategy, as `shoal train` runs it."""

    def __init__(self, job: Job, me: Rank, text: str) -> None:
        strategy = parse(text)
        require_legal(strategy)
        require_runnable(strategy)
        if any(isinstance(level.compress, dgc) for level in strategy.dp_levels):
            # It applies momentum by itself, before elements are chosen: the optimiser's own is left out.
            job = replace(job, optimizer=partial(job.optimizer, betas=(0.0, 0.95)))
        self.prepared = prepare(job, strategy, rank=me.rank, backend=me.backend)
        self.counter = 0

    def step(self, number: int) -> None:
        runner = self.prepared.runner
        runner.step(number, self.counter)
        self.counter = runner.order.next(self.counter)

    def evaluate(self) -> dict[str, float]:
        with self.prepared.engine.consensus():
            return self.prepared.runner.evaluate()

    def close(self) -> None:
        self.prepared.engine.close()


def contestant(name: str, job: Job, me: Rank, ddp_group: Any) -> Contestant:
    """`DDP`, `DDP + PowerSGD(r)`, or a strategy."""
    if name == DDP:
        return Framework(TorchDDP(), job, me, ddp_group)
    if name.startswith(f"{DDP} + PowerSGD("):
        return Framework(PowerSGD(int(name.partition("(")[2].rstrip(")"))), job, me, ddp_group)
    return ByShoal(job, me, name)


def job_of(settings: dict[str, Any]) -> Job:
    """The language task with the batch, the steps and the target asked for; its schedule ends with its steps."""
    job = load_job(f"language:{settings['size']}")
    changes: dict[str, Any] = {name: settings[name] for name in ("steps", "global_batch", "evaluate_every")}
    if isinstance(job.schedule, WarmupCosine):
        changes["schedule"] = replace(job.schedule, steps=settings["steps"])
    if settings.get("seed") is not None:
        changes["seed"] = settings["seed"]
    if settings.get("target") is not None:
        changes["target"] = Target(metric="loss", value=settings["target"])
    return replace(job, **changes)


def ranks_do(settings: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank: what `settings["do"]` says, for each of `settings["names"]`."""
    me = join(backend=BACKENDS["shoal"], emulate=settings.get("emulate"))

    def say(text: str) -> None:
        if me.rank == 0:
            channel.say({"event": "progress", "text": text}) if channel else print(text, file=sys.stderr, flush=True)

    plain = dist.new_group(backend="gloo")
    # To count is to the same bits; what is timed is Gloo itself. Only the shoal backend's links can be emulated.
    carrier = "shoal" if settings.get("emulate") else settings["ddp_backend"]
    ddp_group = plain if carrier == "gloo" else dist.new_group(backend=carrier)
    work = {"train": train_each, "time": time_each}[settings["do"]]
    found = work(settings, me, plain, ddp_group, say)
    leave()
    return found


def train_each(settings: dict[str, Any], me: Rank, plain: Any, ddp_group: Any, say: Say) -> dict[str, Any]:
    """Each to its target: steps, the seconds they took, bytes of every step, and the validation losses."""
    job, found = job_of(settings), {}
    for name in settings["names"]:
        try:
            found[name] = _train(name, job, me, plain, ddp_group, settings["seconds"])
        except (NonFinite, ValueError) as error:
            # All ranks refuse alike, before anything is sent, or find the same loss to be no number.
            found[name] = {"reason": str(error)}
        gc.collect()
        say(f"{name}: {_in_words(found[name])}")
    return found


def _train(name: str, job: Job, me: Rank, plain: Any, ddp_group: Any, limit_s: float) -> dict[str, Any]:
    runs = contestant(name, job, me, ddp_group)
    sent: list[int] = []
    losses: list[tuple[int, float]] = []
    spent_s, reached, step = 0.0, False, 0
    dist.barrier(group=plain)
    BOOK.take()
    while step < job.steps and not reached:
        start = time.perf_counter()
        runs.step(step)
        spent_s += time.perf_counter() - start
        step += 1
        sent.append(BOOK.take().without("setup", "shapes").bytes)
        if step % job.evaluate_every and step < job.steps:
            continue
        metrics = runs.evaluate()
        BOOK.take()
        losses.append((step, metrics["loss"]))
        reached = job.target is not None and job.target.reached(metrics[job.target.metric])
        if _slower(spent_s, plain) > limit_s:
            break
    runs.close()
    return {"reached": reached, "steps": step, "train_s": _slower(spent_s, plain), "sent": sent, "losses": losses}


def _in_words(found: dict[str, Any]) -> str:
    if "reason" in found:
        return str(found["reason"])
    last = found["losses"][-1][1]
    verb = "reached the target" if found["reached"] else "has not reached the target"
    return f"{verb} after {found['steps']} steps, {found['train_s']:.1f} s, validation loss {last:.3f}"


def time_each(settings: dict[str, Any], me: Rank, plain: Any, ddp_group: Any, say: Say) -> dict[str, Any]:
    """All in turn: for every round, seconds a step, and the bytes and packets of it by the host's counters."""
    job = job_of(settings)
    runs = {name: contestant(name, job, me, ddp_group) for name in settings["names"]}
    found: dict[str, Any] = {name: {"steps": 0, "step_s": [], "bytes": [], "packets": []} for name in runs}
    number, names = 0, list(runs)
    for turn in range(settings["rounds"] + 1):
        steps = settings["steps_a_round"] if turn else settings["opening"]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            time.sleep(COUNTERS_LAG_S)
            dist.barrier(group=plain)
            before = left_host()
            start = time.perf_counter()
            for step in range(number, number + steps):
                runs[name].step(step)
            step_s = _slower((time.perf_counter() - start) / steps, plain)
            time.sleep(COUNTERS_LAG_S)
            if turn:
                found[name]["steps"] += steps
                found[name]["step_s"].append(step_s)
                for what, count in left_host().items():
                    found[name][what].append((count - before[what]) / steps)
        number += steps
        say(f"{settings['title']}: round {turn} of {settings['rounds']}" if turn else f"{settings['title']}: warm")
    return found


def left_host() -> dict[str, int]:
    """Bytes and packets that this host has sent by the interface between hosts, as the kernel counts."""
    counters = Path("/sys/class/net") / os.environ.get("GLOO_SOCKET_IFNAME", "lo") / "statistics"
    return {what: int((counters / f"tx_{what}").read_text()) for what in ("bytes", "packets")}


def _slower(seconds: float, group: Any) -> float:
    """The same on all ranks: the slower one's."""
    all_of_them = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(all_of_them, op=dist.ReduceOp.MAX, group=group)
    return float(all_of_them)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    answer = ranks_do(given, None)
    if os.environ["RANK"] == "0":
        Path(given["into"]).write_text(json.dumps(answer))
