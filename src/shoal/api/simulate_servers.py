"""`shoal.simulate` of a strategy with parameter servers: waiting, staleness, and steps to a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.cluster import Cluster
from shoal.common.hindrance import SlowRanks
from shoal.common.printed import PrintedTable
from shoal.estimate.served import ServedSteps, ServerCosts, simulate_servers
from shoal.estimate.target import OPTIMIZERS, default_target
from shoal.planning.candidates import of_strategies
from shoal.planning.price import price_candidates
from shoal.planning.quantities import seconds
from shoal.shapes.shape import Transformer
from shoal.strategy import Strategy, dp, none
from shoal.strategy.seats import seats_of
from shoal.strategy.terms.sync import Served, asp, hogwild

MANY = 10**8
WORD = 4
"""Bytes of a gradient's element and of a parameter's."""
PASSES = 5
"""Over the parameters that an update of servers makes: gradient, two moments, parameter read and written."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SimulatedServers(PrintedTable):
    """A strategy whose replicas are workers of parameter servers, or race in shared memory."""

    strategy: Strategy
    step_s: float
    """Seconds of one step; under rules that hand out tickets, of a batch of them."""
    undisturbed_s: float
    """The same without stragglers and noise."""
    waiting: float
    """The part of the workers' time in which they wait for others."""
    dropped: float
    """The part of the gradients that came too late."""
    staleness_mean: float
    staleness_max: int
    steps_factor: float
    """Steps to the target, relative to gradients that are never stale nor dropped."""
    report: dict[str, Any] = field(compare=False)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return self.report

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        slower = self.step_s / self.undisturbed_s - 1
        rows = [
            ["step", seconds(self.step_s) + (f" ({slower:+.1%} by what disturbs it)" if abs(slower) > 1e-3 else "")],
            [
                "a ticket",
                f"{seconds(self.report['ticket_s'])} computing, {seconds(self.report['push_s'])} to push, "
                f"{seconds(self.report['pull_s'])} to pull",
            ],
            ["waiting", f"{self.waiting:.1%} of the workers' time"],
            ["staleness", f"mean {self.staleness_mean:.2f}, max {self.staleness_max} updates"],
            *([["dropped", f"{self.dropped:.1%} of the gradients"]] if self.dropped else []),
            ["steps to target", f"x {self.steps_factor:.2f} ({self.report['assumed']})"],
            ["time to target", f"x {self.report['time_factor']:.2f} of bsp() without stragglers, by the same servers"],
        ]
        return f"{self.strategy}: {self.report['model']} on {self.report['cluster']}", ["", ""], rows


def is_served(strategy: Strategy) -> bool:
    """Whether the outermost level has servers, or races in shared memory."""
    return seats_of(strategy) is not None or any(isinstance(level.sync, hogwild) for level in strategy.dp_levels)


def simulate_served(
    strategy: Strategy,
    shape: Transformer,
    cluster: Cluster,
    *,
    global_batch: int,
    steps: int,
    slow: Sequence[SlowRanks],
    noise: float,
    seed: int,
    optimizer: str = "adamw",
) -> SimulatedServers:
    """`slow`: ranks that compute longer; a worker is as slow as its slowest rank."""
    level = strategy.dp_levels[0]
    rule, seats = level.sync, seats_of(strategy)
    inside = Strategy(*strategy.terms[1:]) if len(strategy.terms) > 1 else Strategy(dp(1))
    share = max(1, global_batch // level.n)
    inner = cluster.resized(max(1, inside.workers))
    priced = price_candidates(of_strategies([inside], global_batch=share), shape=shape, cluster=inner, everything=True)
    ticket_s = float(priced.step_s[0])
    outer = cluster.levels[-1] if cluster.devices > cluster.node else cluster.levels[0]
    full = shape.parameters * WORD / max(1, inside.workers)
    part = 1.0
    if not isinstance(level.compress, none):
        pushed = level.compress.pushed_bytes(MANY, WORD, step=MANY)
        part = 1.0 if pushed is None else pushed / (MANY * WORD)
    sends = seats is not None
    costs = ServerCosts(
        ticket_s=[ticket_s] * level.n,
        shards=seats.shards if seats is not None else 1,
        push_s=(part * full / outer.bytes_per_s + outer.latency_s) if sends else 0.0,
        pull_s=(full / outer.bytes_per_s + outer.latency_s) if sends else 0.0,
        update_s=PASSES * full / seats.shards / cluster.device.memory_bytes_per_s if seats is not None else 0.0,
    )

    def slower(worker: int, ticket: int) -> float:
        ranks = range(worker * inside.workers, (worker + 1) * inside.workers)
        return max((each.factor for each in slow for rank in ranks if each.strikes(rank, ticket, seed)), default=1.0)

    served = rule if isinstance(rule, Served) else asp()
    calm = simulate_servers(served, costs, steps=max(steps, 20))
    found = simulate_servers(served, costs, steps=max(steps, 20), slower=slower, noise=noise, seed=seed)
    target = default_target(shape)
    fresh = target.steps(global_batch)
    factor = target.steps(global_batch * found.used, staleness=found.stale_steps) / fresh
    together = simulate_servers(dp(level.n).sync, costs, steps=20)  # type: ignore[arg-type]
    return _result(strategy, shape, cluster, found, calm, costs, factor, together.step_s, optimizer)


def _result(
    strategy: Strategy,
    shape: Transformer,
    cluster: Cluster,
    found: ServedSteps,
    calm: ServedSteps,
    costs: ServerCosts,
    factor: float,
    together_s: float,
    optimizer: str,
) -> SimulatedServers:
    report = {
        "model": shape.name,
        "strategy": str(strategy),
        "cluster": cluster.name,
        "step_s": found.step_s,
        "undisturbed_s": calm.step_s,
        "waiting": found.waiting,
        "dropped": found.dropped,
        "used": found.used,
        "ticket_s": costs.ticket_s[0],
        "push_s": costs.push_s,
        "pull_s": costs.pull_s,
        "update_s": costs.update_s,
        "staleness": dict(sorted(found.staleness.items())),
        "staleness_mean": found.staleness_mean,
        "stale_steps": found.stale_steps,
        "ahead": dict(sorted(found.ahead.items())),
        "steps_factor": factor,
        "time_factor": found.step_s * factor / together_s,
        "assumed": OPTIMIZERS[optimizer].origin,
    }
    return SimulatedServers(
        strategy=strategy,
        step_s=found.step_s,
        undisturbed_s=calm.step_s,
        waiting=found.waiting,
        dropped=found.dropped,
        staleness_mean=found.staleness_mean,
        staleness_max=max(found.staleness, default=0),
        steps_factor=factor,
        report=report,
    )
