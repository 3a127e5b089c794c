"""`shoal.plan(job)`: a job of any kind on this machine, estimated from what `calibrate` measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.api.call import job_of
from shoal.cluster import BadCluster
from shoal.comm.calibration import read_calibration
from shoal.estimate.steps.read import machine_here
from shoal.strategy import Strategy, SyncTerm

if TYPE_CHECKING:
    from shoal.job import Job

FAMILIES = ("dp", "tp", "cp", "pp", "spatial")
FEWEST_EXCHANGES = 8
"""In a run, for a period to be tried over a link."""
AUTO_PERIODS = (8, 32, 128, 512)
"""Steps between exchanges of islands that are tried unless they are given, under DiLoCo's rule."""


def report_here(
    what: str | Job,
    *,
    devices: int | None,
    batch: int | None,
    top: int,
    size: str | None,
    rules: Sequence[SyncTerm] = (),
    optimizer: str = "adamw",
    link: str | None = None,
) -> tuple[dict[str, Any], list[Strategy]]:
    """The report, and the strategies that the engine can run, best first."""
    machine, links = machine_here(), read_calibration()
    if machine is None or links is None:
        raise BadCluster("this machine has not been calibrated; run `shoal calibrate` first")
    from shoal.calibration.job_model import job_model
    from shoal.parallel.runnable import cannot_run
    from shoal.planning.here import break_even_bandwidths, over_link, plan_here, plane_cuts

    rate = None if link is None else _bytes_per_s(link)
    world = devices or machine.ranks
    job = job_of(what, size=size)
    if batch is not None:
        job = replace(job, global_batch=batch)
    model, facts = job_model(job, planes=plane_cuts(world))
    plan = plan_here(model, facts, machine, world=world, rules=rules)
    ahead = [(strategy, estimate) for strategy, estimate in plan.ranked if cannot_run(strategy) is None]
    rows = [_row(strategy, estimate) for strategy, estimate in ahead]
    best_of: dict[str, Any] = {}
    for row in rows:
        best_of.setdefault(row["family"], row)
    report = {
        "title": f"{job.name} on {world} ranks of this machine, batch {job.global_batch}: "
        f"{len(rows):,} legal strategies; by step time" + (f", times the steps that {rules[0]} adds" if rules else ""),
        "global_batch": job.global_batch,
        "world": world,
        "legal": len(rows),
        "plans": rows[:top],
        "families": list(best_of.values()),
        "over_link": []
        if rate is None
        else [
            {"strategy": str(each.strategy), "step_s": each.step_s, "slowdown": each.slowdown}
            for each in over_link(
                model,
                machine,
                links.network.between,
                bytes_per_s=rate,
                optimizer=optimizer,
                periods=[rule.period for rule in rules if rule.period] or _periods(job.steps),
            )
        ],
        "link": link,
        "crossings_bytes_per_s": break_even_bandwidths(model, machine, links.network.between),
    }
    return report, [strategy for strategy, _ in ahead]


def _periods(steps: int) -> list[int]:
    """Those of which a run of so many steps has enough."""
    return [each for each in AUTO_PERIODS if FEWEST_EXCHANGES * each <= steps] or [AUTO_PERIODS[0]]


def _bytes_per_s(link: str) -> float:
    from shoal.api.plan import CannotPlan
    from shoal.files.quantities import BadQuantity, rate

    try:
        found = rate(link)
    except BadQuantity as error:
        raise CannotPlan(f"--link {error}") from None
    if found <= 0:
        raise CannotPlan(f"--link {link}: expected a rate above 0")
    return found


def _row(strategy: Any, estimate: Any) -> dict[str, Any]:
    axes = {type(term).__name__ for term in strategy.terms if getattr(term, "n", 1) > 1}
    largest = sorted(estimate.step_split.items(), key=lambda pair: -pair[1])[:3]
    return {
        "strategy": str(strategy),
        "family": " x ".join(name for name in FAMILIES if name in axes) or "one rank",
        "step_s": estimate.step_s,
        "split_s": dict(estimate.step_split),
        "memory_bytes": estimate.memory_bytes,
        "why": ", ".join(f"{name} {seconds / estimate.step_s:.0%}" for name, seconds in largest),
    }
