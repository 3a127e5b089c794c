"""`shoal plan JOB --cluster this`: a job of any kind on this machine, estimated from what `calibrate` measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.cli.output import emitter
from shoal.cluster import BadCluster
from shoal.comm.calibration import read_calibration
from shoal.estimate.steps.read import machine_here
from shoal.strategy import SyncTerm

FAMILIES = ("dp", "tp", "cp", "pp")
FEWEST_EXCHANGES = 8
"""In a run, for a period to be tried over a link."""
MOST_OVER_LINK = 8
"""Strategies over a link that are printed."""
AUTO_PERIODS = (8, 32, 128, 512)
"""Steps between exchanges of islands that are tried unless they are given, under DiLoCo's rule."""


def plan_here_command(
    what: str, *, devices: int | None, batch: int | None, top: int, as_json: bool, run: bool, size: str | None,
    rules: Sequence[SyncTerm] = (), optimizer: str = "adamw", link: str | None = None,
) -> int:  # fmt: skip
    """Plans, prints, and if asked trains."""
    machine, links = machine_here(), read_calibration()
    if machine is None or links is None:
        raise BadCluster("this machine has not been calibrated; run `shoal calibrate` first")
    from dataclasses import replace

    from shoal.calibration.job_model import job_model
    from shoal.job import load_job
    from shoal.parallel.runnable import cannot_run
    from shoal.planning.here import break_even_bandwidths, over_link, plan_here

    rate = None if link is None else _bytes_per_s(link)
    world = devices or machine.ranks
    with emitter(_print, as_json=as_json and not run) as emit:
        job = load_job(what, size=size)
        if batch is not None:
            job = replace(job, global_batch=batch)
        model, facts = job_model(job)
        plan = plan_here(model, facts, machine, world=world, rules=rules)
        ahead = [(strategy, estimate) for strategy, estimate in plan.ranked if cannot_run(strategy) is None]
        rows = [_row(strategy, estimate) for strategy, estimate in ahead]
        best_of: dict[str, Any] = {}
        for row in rows:
            best_of.setdefault(row["family"], row)
        report = {
            "title": f"{job.name} on {world} ranks of this machine, batch {job.global_batch}: "
            f"{len(rows):,} legal strategies; by step time"
            + (f", times the steps that {rules[0]} adds" if rules else ""),
            "global_batch": job.global_batch, "world": world, "legal": len(rows), "plans": rows[:top],
            "families": list(best_of.values()),
            "over_link": [] if rate is None else [
                {"strategy": str(each.strategy), "step_s": each.step_s, "slowdown": each.slowdown}
                for each in over_link(
                    model, machine, links.network.between, bytes_per_s=rate, optimizer=optimizer,
                    periods=[rule.period for rule in rules if rule.period] or _periods(job.steps),
                )
            ],
            "link": link,
            "crossings_bytes_per_s": break_even_bandwidths(model, machine, links.network.between),
        }  # fmt: skip
        if not (as_json and run):
            emit(report)
    if not run:
        return 0
    from shoal.cli.plan import train_by

    return train_by(ahead[0][0], what, size=size, batch=batch, as_json=as_json)


def _periods(steps: int) -> list[int]:
    """Those of which a run of so many steps has enough."""
    return [each for each in AUTO_PERIODS if FEWEST_EXCHANGES * each <= steps] or [AUTO_PERIODS[0]]


def _bytes_per_s(link: str) -> float:
    from shoal.cli.plan import CannotPlan
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
        "strategy": str(strategy), "family": " x ".join(name for name in FAMILIES if name in axes) or "one rank",
        "step_s": estimate.step_s, "split_s": dict(estimate.step_split), "memory_bytes": estimate.memory_bytes,
        "why": ", ".join(f"{name} {seconds / estimate.step_s:.0%}" for name, seconds in largest),
    }  # fmt: skip


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from shoal.planning.quantities import seconds

    console = Console(highlight=False)
    console.print(Text(report["title"], style="bold"))
    for heading, rows in (("", report["plans"]), ("Best of each family", report["families"])):
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for name in ("", "step", "memory", "of the step"):
            table.add_column(name, justify="left" if name in ("", "of the step") else "right", no_wrap=True)
        table.add_column("strategy", overflow="fold")
        for number, row in enumerate(rows, start=1):
            label = row["family"] if heading else str(number)
            table.add_row(
                label, seconds(row["step_s"]), f"{row['memory_bytes'] / 1e6:,.0f} MB", row["why"], row["strategy"]
            )
        console.print()
        if heading:
            console.print(Text(heading, style="bold"))
        console.print(table)
    if report["over_link"]:
        first, dense = report["over_link"][0], next(row for row in report["over_link"] if row["strategy"] == "dp(2)")
        console.print()
        console.print(Text(f"On two hosts, one rank each, over {report['link']}", style="bold"))
        for row in report["over_link"][:MOST_OVER_LINK]:
            sooner = dense["step_s"] / (row["step_s"] * row["slowdown"])
            words = f"{seconds(row['step_s'])} a step, {row['slowdown']:.3g} times the steps"
            console.print(
                Text(f"  {row['strategy']}: {words}; to the target {sooner:.3g} times as fast as dp(2)"), soft_wrap=True
            )
        console.print(Text(f"  So: {first['strategy']}"))
    if report["crossings_bytes_per_s"]:
        below = ", ".join(f"{name} {8e-9 * rate:.2g}" for name, rate in report["crossings_bytes_per_s"].items())
        console.print()
        console.print(Text("On two hosts, one rank each", style="bold"))
        console.print(
            Text(f"  Compression pays off below this inter-host bandwidth (Gb/s): {below}"), soft_wrap=True
        )
