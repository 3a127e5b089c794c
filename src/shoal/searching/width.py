"""Few wide trials or many narrow ones: how the devices of a search are divided among trials.

A trial on one device wastes nothing on messages, so many narrow trials finish more of them in an hour. Fewer trials
than devices leave some idle, and a model that no device holds needs several. What `shoal calibrate` measured decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from shoal.calibration.job_model import job_model
from shoal.estimate.steps.read import machine_here
from shoal.parallel.runnable import cannot_run
from shoal.planning.here import plan_here
from shoal.searching.options import CannotSearch
from shoal.strategy import Strategy, dp, is_legal

if TYPE_CHECKING:
    from shoal.estimate.steps.machine import Machine
    from shoal.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Devices divided among trials."""

    strategy: Strategy
    workers: int
    why: str


def divide(job: Job, *, devices: int, trials: int, machine: Machine | None = None) -> Division:
    """The division that finishes the trials first.

    Args:
        job: One of the space: they are taken to be alike.
        devices: Of this machine.
        trials: That may run at the same time.
        machine: What was measured of it. None: what the calibration file has.
    """
    machine = machine or machine_here()
    if machine is None:
        return _uncalibrated(job, devices=devices, trials=trials)
    best: Division | None = None
    least_s, narrow_s = float("inf"), float("inf")
    model, facts = job_model(job)
    for wide in range(1, min(devices, machine.ranks) + 1):
        workers = min(devices // wide, trials)
        ranked = plan_here(model, facts, machine, world=wide).ranked
        found = next(((each, estimate) for each, estimate in ranked if cannot_run(each) is None), None)
        if found is None or found[1].step_s is None or not _fits(found[1].memory_bytes, wide * workers, machine):
            continue
        step_s = ceil(trials / workers) * found[1].step_s
        narrow_s = step_s if wide == 1 else narrow_s
        if step_s < least_s:
            least_s = step_s
            best = Division(strategy=found[0], workers=workers, why="")
    if best is None:
        raise CannotSearch(f"no strategy on up to {devices} devices is predicted to fit this machine; give --strategy")
    wide = best.strategy.world
    gain = f", predicted to end in {least_s / narrow_s:.0%} of the time of one device each" if wide > 1 else ""
    return Division(strategy=best.strategy, workers=best.workers, why=f"{_words(best.workers, wide)}{gain}")


def _words(workers: int, wide: int) -> str:
    return f"{workers} trial{'s' if workers > 1 else ''} at a time, each on {wide} device{'s' if wide > 1 else ''}"


def _fits(bytes_a_rank: float | None, ranks: int, machine: Machine) -> bool:
    return bytes_a_rank is None or bytes_a_rank * ranks <= machine.memory_bytes


def _uncalibrated(job: Job, *, devices: int, trials: int) -> Division:
    """One device each; where trials are fewer, an equal share of the devices, by data parallelism."""
    wide = max(1, devices // trials)
    while wide > 1 and (job.global_batch % wide or not is_legal(Strategy(dp(wide)), world=wide)):
        wide -= 1
    strategy = Strategy(dp(wide)) if wide > 1 else Strategy()
    workers = min(trials, devices // wide)
    why = f"{_words(workers, wide)}; `shoal calibrate` would let a prediction decide"
    return Division(strategy=strategy, workers=workers, why=why)
