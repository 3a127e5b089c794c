"""`shoal simulate`: one strategy on a cluster one does not have, simulated event by event.

Prints what a step takes, what is idle, what stragglers, slow links and random slow-downs make of it, and what is left
of the time once checkpoints, failures and restarts are paid for; draws it for Perfetto and as SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from shoal.cli.output import print_json, require_drawable, write_file
from shoal.cli.plan import CannotPlan, samples_of, the_cluster
from shoal.common.hindrance import BadHindrance, SlowRanks, read_slow_ranks
from shoal.estimate.simulate import Disturbance, Links, Step, Straggler, goodput, perfetto, simulate_steps
from shoal.estimate.simulate.disturb import BadDisturbance
from shoal.estimate.simulate.goodput import DEVICE_MTBF_H, RESTART_S, checkpoint_time_s
from shoal.planning.candidates import of_strategies
from shoal.planning.legal import facts_of
from shoal.planning.price import price_candidates, step_costs_of
from shoal.planning.quantities import GB, seconds
from shoal.shapes.presets import preset
from shoal.shapes.shape import Transformer
from shoal.strategy import Strategy, parse, require_legal

Found = TypeVar("Found")

MOST_EVENTS = 400_000
"""Passes in one trace."""


def simulate_command(
    what: str, *, strategy_text: str, cluster_name: str, devices: int | None, batch: str | None, steps: int,
    stragglers: Sequence[str], links: Sequence[str], noise: float, seed: int, mtbf_h: float | None,
    checkpoint_s: float | None, restart_s: float | None, trace_file: str | None, svg_file: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Simulates, prints and draws."""
    shape, strategy = preset(what), parse(strategy_text)
    place = the_cluster(cluster_name, devices=strategy.workers if devices is None else devices)
    global_batch = samples_of(batch, shape) or strategy.replicas * strategy.micro_batches
    require_legal(strategy, world=place.devices, facts=facts_of(shape, global_batch=global_batch))
    rows = of_strategies([strategy], global_batch=global_batch)
    priced = price_candidates(rows, shape=shape, cluster=place, everything=True)
    costs = step_costs_of(rows, shape=shape, cluster=place)
    slow = _slow_ranks(stragglers, world=costs.ranks)
    disturbance = Disturbance(
        stragglers=tuple(Straggler(rank=each.rank, factor=each.factor) for each in slow if each.rank is not None),
        random=tuple((each.chance, each.factor) for each in slow if each.rank is None),
        links=_each(links, "--link", lambda rank, left: Links(rank=rank, left=left)),
        noise=noise, seed=seed,
    )  # fmt: skip
    calm_s = float(np.mean([step.step_s for step in simulate_steps(costs, steps=costs.period)]))
    simulated = list(simulate_steps(costs, disturbance, steps=steps))
    nodes = max(1, place.devices // place.node)
    written_s = checkpoint_time_s(parameters=shape.parameters, nodes=nodes) if checkpoint_s is None else checkpoint_s
    good = goodput(
        devices=place.devices, device_mtbf_h=DEVICE_MTBF_H if mtbf_h is None else mtbf_h,
        restart_s=RESTART_S if restart_s is None else restart_s,
        checkpoint_s=written_s,
    )  # fmt: skip
    report: dict[str, Any] = {
        "model": shape.name, "strategy": str(strategy), "cluster": place.name, "ranks": costs.ranks,
        "global_batch": global_batch, "classes": len(simulated[-1].counts), "events": len(simulated[-1].order),
        "price_s": float(priced.step_s[0]), "undisturbed_s": calm_s, "step_s": [step.step_s for step in simulated],
        "idle": simulated[-1].idle, "idle_of_slowest": simulated[-1].timeline(_slowest(simulated[-1])).bubble,
        "memory_bytes": float(priced.memory_bytes[0]), "fits": bool(priced.fits[0]),
        "goodput": {
            "part": good.part, "mtbf_s": good.mtbf_s, "checkpoint_s": good.checkpoint_s, "restart_s": good.restart_s,
            "interval_s": good.interval_s, "steps_between_checkpoints": good.steps(calm_s),
        },
    }  # fmt: skip
    if trace_file is not None:
        write_file(_trace(simulated), trace_file, option="--perfetto")
    if svg_file is not None:
        write_file(_picture(simulated[-1], strategy), svg_file, option="--svg")
    if as_json:
        print_json(report)
    else:
        _print(report, shape=shape, drawn=[each for each in (trace_file, svg_file) if each])
    return 0


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


def _print(report: dict[str, Any], *, shape: Transformer, drawn: Sequence[str]) -> None:
    times = np.array(report["step_s"])
    good = report["goodput"]
    tokens = report["global_batch"] * shape.sequence
    print(f"{report['strategy']}")
    print(
        f"  {report['model']} on {report['ranks']:,} ranks of {report['cluster']}, {report['global_batch']:,} "
        f"sequences a step; simulated as {report['classes']:,} class{'es' if report['classes'] > 1 else ''} of "
        f"replicas, {report['events']:,} passes"
    )
    print(f"  step       {seconds(report['undisturbed_s'])} undisturbed; by the formulas {seconds(report['price_s'])}")
    slower = times.mean() / report["undisturbed_s"] - 1
    if len(times) > 1 or abs(slower) > 1e-9:
        spread = f" over {len(times)} steps, {seconds(times.min())} to {seconds(times.max())}" if len(times) > 1 else ""
        print(f"  disturbed  {seconds(float(times.mean()))} ({slower:+.1%}){spread}")
    idle = f"  idle       ranks compute nothing in {report['idle']:.1%} of the passes' time"
    if f"{report['idle']:.1%}" != f"{report['idle_of_slowest']:.1%}":
        idle += f"; those of the slowest replica, which --svg shows, in {report['idle_of_slowest']:.1%}"
    print(idle)
    print(f"  memory     {report['memory_bytes'] / GB:.1f} GB{'' if report['fits'] else ': does not fit'}")
    print(f"  speed      {tokens / float(times.mean()):,.0f} tokens/s")
    print(
        f"  goodput    {good['part']:.1%} with a failure every {seconds(good['mtbf_s'])}, a checkpoint of "
        f"{seconds(good['checkpoint_s'])} every {good['steps_between_checkpoints']:,} steps, restarts of "
        f"{seconds(good['restart_s'])}"
    )
    for path in drawn:
        print(f"  drawn in   {path}")
