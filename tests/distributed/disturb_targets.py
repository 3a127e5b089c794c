"""What the tests of delays and kills run on real ranks: short runs that resume, step, evaluate and save, with one rank
delayed at one point."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.checkpoint.contents import contents_of
from shoal.checkpoint.restore import restore
from shoal.checkpoint.save import averaged_buffers, save
from shoal.checkpoint.saved import open_checkpoint
from shoal.comm.json_exchange import exchange
from shoal.comm.points import on_reach
from shoal.job import load_job
from shoal.launch.join import join, leave
from shoal.runtime.setup import prepare
from shoal.strategy import parse
from shoal.training.entry import train_run

DELAY_S = 0.06
TIMES = 2
"""How often a point delays its rank in one run."""


class Delay:
    """Delays this rank when it reaches a point; notes every point that it reaches."""

    def __init__(self, point: str | None) -> None:
        self.point, self.times = point, 0
        self.reached: set[str] = set()

    def __call__(self, point: str) -> None:
        self.reached.add(point)
        if point == self.point and self.times < TIMES:
            self.times += 1
            time.sleep(DELAY_S)


def delayed_runs(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """One run without a delay, then one with each (point, rank): those that ended otherwise, and all points reached."""
    me = join()
    base = Path(arguments["folder"])
    hook = Delay(None)
    on_reach(hook)
    job, strategy = load_job(arguments["job"]), parse(arguments["strategy"])

    def run(folder: Path, start: Path | None) -> str:
        ready = prepare(job, strategy, rank=me.rank, backend=me.backend)
        engine, runner = ready.engine, ready.runner
        counter, step = 0, 0
        if start is not None:
            restore(engine, open_checkpoint(start))
            counter, step = 24, 2
        for _ in range(2):
            runner.step(step, counter)
            counter, step = counter + 12, step + 1
        metrics = runner.evaluate()
        save(folder, engine, step=step, progress={}, keep=1)
        runner.step(step, counter)
        save(folder, engine, step=step, progress={}, keep=1)
        digest = hashlib.sha256(repr(sorted(metrics.items())).encode())
        buffers = averaged_buffers(engine.model, engine.replicas.everyone)
        for name, values in sorted(contents_of(engine, buffers=buffers, rank=me.rank).tensors, key=lambda row: row[0]):
            digest.update(name.encode() + values.detach().contiguous().numpy().tobytes())
        engine.close()
        return digest.hexdigest()

    run(base / "first", None)
    # The second save of the first run is of the same step as the first, so the step after it is in the checkpoint.
    start = next((base / "first").glob("step-*[0-9]"))
    expected = run(base / "plain", start)
    reached = sorted({point for row in exchange({"points": sorted(hook.reached)}) for point in row["points"]})
    differing, stopped = [], None
    cases = arguments.get("cases") or [[point, rank] for point in reached for rank in range(me.world)]
    for number, (point, rank) in enumerate(cases):
        hook.point, hook.times = (point if rank == me.rank else None), 0
        folder = base / f"delayed-{number}"
        try:
            digest = run(folder, start)
        except Exception as error:
            stopped = f"rank {rank} delayed at '{point}': {error}"
            break
        if any(row["differs"] for row in exchange({"differs": digest != expected})):
            differing.append(f"rank {rank} delayed at '{point}'")
        hook.point = None
        dist.barrier()
        if me.rank == 0:
            shutil.rmtree(folder)
    on_reach(None)
    if stopped is None:
        leave()
    return {"differing": differing, "stopped": stopped, "reached": reached, "runs": len(cases)}


class Kill:
    """Ends this process, or all ranks with it, when it reaches a point for the given time."""

    def __init__(self, point: str, time: int) -> None:
        self.point, self.left = point, time

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def train_and_be_killed(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """The training loop; the rank `victim` kills itself at a point."""
    if arguments.get("victim") == channel.rank:
        on_reach(Kill(arguments["point"], arguments["time"]))
    own = ("victim", "point", "time")
    return train_run({name: value for name, value in arguments.items() if name not in own}, channel)


def spoilt_restore(arguments: dict[str, Any], channel: Any) -> str:
    """One rank changes one value after it was read, before the ranks compare: what the comparison answers."""
    me = join()
    job, strategy = load_job(arguments["job"]), parse(arguments["strategy"])
    ready = prepare(job, strategy, rank=me.rank, backend=me.backend)
    ready.runner.step(0, 0)
    path = save(Path(arguments["folder"]), ready.engine, step=1, progress={})

    def spoil(point: str) -> None:
        if point != "restore: optimizer read" or me.rank != arguments["rank"]:
            return
        engine = ready.engine
        if arguments["what"] == "parameter":
            held = engine.owner.masters[0] if not engine.owner.keeps_full else engine.buckets[0].buffer.values
            held[0] += 1e-6 + held[0].abs() * 1e-6
        elif arguments["what"] == "state":
            next(iter(engine.optimizer.optimizer.state.values()))["exp_avg"].view(-1)[0] += 1.0
        else:
            engine.model.get_buffer("shift")[3] += 1.0

    on_reach(spoil)
    try:
        restore(ready.engine, open_checkpoint(path))
    except ValueError as error:
        return str(error)
    finally:
        on_reach(None)
    leave()
    return ""
