"""`shoal.simulate`: one strategy on a cluster one does not have, simulated event by event.

Reports what a step takes, what is idle, what stragglers, slow links and random slow-downs make of it, and what is left
of the time once checkpoints, failures and restarts are paid for; draws it for Perfetto and as SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shoal.api.call import checked_keywords, job_of, strategy_of
from shoal.api.drawable import require_drawable
from shoal.api.plan import CannotPlan, names_job, samples_of, the_cluster
from shoal.api.simulate_servers import SimulatedServers, is_served, simulate_served
from shoal.common.hindrance import BadHindrance, SlowRanks, read_slow_ranks
from shoal.common.printed import PrintedTable
from shoal.estimate.simulate import Disturbance, Links, Step, Straggler, goodput, perfetto, simulate_steps
from shoal.estimate.simulate.disturb import BadDisturbance
from shoal.estimate.simulate.goodput import DEVICE_MTBF_H, RESTART_S, checkpoint_time_s
from shoal.planning.candidates import of_strategies
from shoal.planning.legal import facts_of
from shoal.planning.price import price_candidates, step_costs_of
from shoal.planning.quantities import GB, seconds
from shoal.shapes.presets import preset
from shoal.shapes.shape import Transformer
from shoal.strategy import Strategy, Term, require_legal

if TYPE_CHECKING:
    from shoal.job import Job

Found = TypeVar("Found")

MOST_EVENTS = 400_000
"""Passes in one trace."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SimulatedSteps(PrintedTable):
    """Steps of a strategy on a cluster, simulated event by event."""

    strategy: Strategy
    step_s: list[float]
    """Seconds of each step, with everything that disturbs it."""
    undisturbed_s: float
    fits: bool
    memory_bytes: float
    report: dict[str, Any]
    """All that the verb prints with `--json`."""
    shape: Transformer = field(compare=False)
    steps: tuple[Step, ...] = field(compare=False)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return self.report

    def to_perfetto(self) -> str:
        """A trace for ui.perfetto.dev."""
        return _trace(self.steps)

    def to_svg(self) -> str:
        """The timeline of the slowest replica in the last step."""
        return _picture(self.steps[-1], self.strategy)

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        good = self.report["goodput"]
        rows = [
            ["step", seconds(float(np.mean(self.step_s)))],
            ["undisturbed", seconds(self.undisturbed_s)],
            ["idle", f"{self.report['idle']:.1%}"],
            ["memory", f"{self.memory_bytes / GB:.1f} GB" + ("" if self.fits else ": does not fit")],
            ["goodput", f"{good['part']:.1%}"],
        ]
        title = f"{self.strategy}: {self.report['model']} on {self.report['ranks']:,} ranks of {self.report['cluster']}"
        return title, ["", ""], rows


@checked_keywords
def simulate(
    what: str | Job,
    strategy: str | Strategy | Term,
    *,
    cluster: str,
    devices: int | None = None,
    batch: str | int | None = None,
    steps: int = 1,
    straggler: Sequence[str] = (),
    link: Sequence[str] = (),
    noise: float = 0.0,
    seed: int = 0,
    mtbf_hours: float | None = None,
    checkpoint_seconds: float | None = None,
    restart_seconds: float | None = None,
) -> SimulatedSteps | SimulatedServers:
    """Simulates a strategy on a cluster you do not have.

    Args:
        what: A preset shape such as `"gpt:175b"`, or a job whose model is a Transformer.
        strategy: Text or terms.
        cluster: A preset such as `"dgx-a100"`, or a TOML file.
        devices: Devices. None: the strategy's ranks.
        batch: Global batch, sequences or tokens. None: micro-batches of one.
        steps: Steps to simulate.
        straggler: Slow ranks: `"rank 2: 3x"`, `"random 10%: 5x"`.
        link: `"RANK:FRACTION"`, the fraction of bandwidth that its links keep.
        noise: Random slow-downs: a fraction of a step, such as 0.02.
        seed: Seed of random slow-downs.
        mtbf_hours: Mean hours between failures of one device.
        checkpoint_seconds: Seconds to write one checkpoint.
        restart_seconds: Seconds from a failure until steps resume.

    Returns:
        Step times, idle time, memory, goodput; `.to_perfetto()` and `.to_svg()` draw them. Of parameter servers and
        `hogwild()`: step time, waiting, staleness, and steps to a target.

    Example:
        shoal.simulate("gpt:1.3b", "dp(8) * tp(2)", cluster="dgx-a100", straggler=["rank 3: 2x"])
    """
    strategy, stragglers, links = strategy_of(strategy), list(straggler), list(link)
    mtbf_h, checkpoint_s, restart_s = mtbf_hours, checkpoint_seconds, restart_seconds
    shape = _shape(what)
    place = the_cluster(cluster, devices=strategy.workers if devices is None else devices)
    asked = None if batch is None else str(batch)
    global_batch = samples_of(asked, shape) or strategy.replicas * strategy.micro_batches
    served = is_served(strategy)
    world = strategy.world if served else place.devices
    require_legal(strategy, world=world, facts=facts_of(shape, global_batch=global_batch))
    if served:
        return simulate_served(
            strategy,
            shape,
            place,
            global_batch=global_batch,
            steps=steps,
            noise=noise,
            seed=seed,
            slow=_slow_ranks(stragglers, world=strategy.workers),
        )
    rows = of_strategies([strategy], global_batch=global_batch)
    priced = price_candidates(rows, shape=shape, cluster=place, everything=True)
    costs = step_costs_of(rows, shape=shape, cluster=place)
    slow = _slow_ranks(stragglers, world=costs.ranks)
    disturbance = Disturbance(
        stragglers=tuple(Straggler(rank=each.rank, factor=each.factor) for each in slow if each.rank is not None),
        random=tuple((each.chance, each.factor) for each in slow if each.rank is None),
        links=_each(links, "--link", lambda rank, left: Links(rank=rank, left=left)),
        noise=noise,
        seed=seed,
    )
    calm_s = float(np.mean([step.step_s for step in simulate_steps(costs, steps=costs.period)]))
    simulated = list(simulate_steps(costs, disturbance, steps=steps))
    nodes = max(1, place.devices // place.node)
    written_s = checkpoint_time_s(parameters=shape.parameters, nodes=nodes) if checkpoint_s is None else checkpoint_s
    good = goodput(
        devices=place.devices,
        device_mtbf_h=DEVICE_MTBF_H if mtbf_h is None else mtbf_h,
        restart_s=RESTART_S if restart_s is None else restart_s,
        checkpoint_s=written_s,
    )
    report: dict[str, Any] = {
        "model": shape.name,
        "strategy": str(strategy),
        "cluster": place.name,
        "ranks": costs.ranks,
        "global_batch": global_batch,
        "classes": len(simulated[-1].counts),
        "events": len(simulated[-1].order),
        "price_s": float(priced.step_s[0]),
        "undisturbed_s": calm_s,
        "step_s": [step.step_s for step in simulated],
        "idle": simulated[-1].idle,
        "idle_of_slowest": simulated[-1].timeline(_slowest(simulated[-1])).bubble,
        "memory_bytes": float(priced.memory_bytes[0]),
        "fits": bool(priced.fits[0]),
        "goodput": {
            "part": good.part,
            "mtbf_s": good.mtbf_s,
            "checkpoint_s": good.checkpoint_s,
            "restart_s": good.restart_s,
            "interval_s": good.interval_s,
            "steps_between_checkpoints": good.steps(calm_s),
        },
    }
    return SimulatedSteps(
        strategy=strategy,
        step_s=report["step_s"],
        undisturbed_s=calm_s,
        fits=report["fits"],
        memory_bytes=report["memory_bytes"],
        report=report,
        shape=shape,
        steps=tuple(simulated),
    )


def _shape(what: str | Job) -> Transformer:
    if isinstance(what, str) and not names_job(what):
        return preset(what)
    from shoal.layout.job_shape import shape_of

    return shape_of(job_of(what))[0]


def _slow_ranks(texts: Sequence[str], *, world: int) -> tuple[SlowRanks, ...]:
    try:
        slow = read_slow_ranks("; ".join(texts), world=world)
    except BadHindrance as error:
        raise BadDisturbance(str(error)) from None
    if any(each.added_s for each in slow):
        raise BadDisturbance("--straggler: simulated ranks compute by the cost model; give a factor, such as all: 2x")
    return slow


def _each(texts: Sequence[str], option: str, build: Callable[[int, float], Found]) -> tuple[Found, ...]:
    found = []
    for text in texts:
        rank, colon, number = text.partition(":")
        try:
            if not colon:
                raise ValueError
            found.append(build(int(rank), float(number)))
        except ValueError:
            raise BadDisturbance(f"{option} {text}: expected RANK:NUMBER, for example {option} 17:1.5") from None
    return tuple(found)


def _trace(simulated: Sequence[Step]) -> str:
    events = sum(step.starts_s.size for step in simulated)
    if events > MOST_EVENTS:
        raise CannotPlan(
            f"--perfetto: a trace of {events:,} passes is too large to be opened, at most {MOST_EVENTS:,} are written; "
            "simulate fewer steps, or without --noise"
        )
    return perfetto(simulated)


def _slowest(step: Step) -> int:
    """The class of replicas that a picture shows."""
    return int(np.argmax(step.passed_s.max(axis=0)))


def _picture(step: Step, strategy: Strategy) -> str:
    from shoal.pictures.timeline import timeline_svg

    require_drawable("--svg", len(step.order))
    timeline = step.timeline(_slowest(step))
    # Pictures count in forwards of one stage: seconds would make letters of no width.
    unit_s = timeline.forward_s or 1.0
    lanes = tuple(
        tuple(replace(box, start_s=box.start_s / unit_s, stop_s=box.stop_s / unit_s) for box in lane)
        for lane in timeline.lanes
    )
    scaled = replace(
        timeline,
        lanes=lanes,
        makespan_s=timeline.makespan_s / unit_s,
        idle_s=tuple(each / unit_s for each in timeline.idle_s),
    )
    return timeline_svg(scaled, str(strategy))
