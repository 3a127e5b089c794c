"""What `shoal plan --sync "asp()"` adds to a plan: replicas that do not wait for each other, and what that is worth.

The best plans whose replicas step together give the replicas: their parallelism inside stays, and the level of dp gets
servers (or a quorum). Each is simulated event by event, with the stragglers that were named, and compared with the same
replicas under bsp(), which wait for the slowest. Staleness and local steps cost steps to the target (assumed, by
optimiser: `estimate/target.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shoal.api.simulate_servers import WORD, simulate_served
from shoal.cluster import Cluster
from shoal.common.hindrance import SlowRanks, read_slow_ranks
from shoal.estimate.served import ServerCosts, simulate_servers
from shoal.estimate.target import local_slowdown
from shoal.planning.link_words import server_shards
from shoal.planning.quantities import seconds
from shoal.planning.rank import Plan
from shoal.strategy import Strategy, SyncTerm, asp, bsp, dp, is_legal, ps
from shoal.strategy.terms.sync import Served

MOST = 5
"""Plans that are tried."""
STEPS = 40
"""Simulated of each."""


def is_waitless(rule: SyncTerm) -> bool:
    """Whether replicas under it go on without the slowest, by servers or with a quorum."""
    return isinstance(rule, Served) or bool(rule.values().get("quorum"))


def served_rows(found: Plan, rule: SyncTerm, *, straggler: Sequence[str] = (), seed: int = 0) -> list[dict[str, Any]]:
    """Strategies with the rule, best first: what a step takes, and how much sooner the target is reached."""
    question, rows = found.question, []
    for strategy, ticket_s in _candidates(found, rule):
        text = "; ".join(straggler)
        slow = read_slow_ranks(text, world=strategy.workers)
        rows.append(_row(strategy, rule, question, slow, seed, ticket_s))
    return sorted(rows, key=lambda row: row["score_s"])


def _candidates(found: Plan, rule: SyncTerm) -> Iterator[tuple[Strategy, float]]:
    seen = set[str]()
    for row in found.ranked:
        plain = found.strategy(int(row))
        levels = plain.dp_levels
        if not levels or levels[0].n < 2 or (levels[0].zero and len(levels) == 1) or plain.terms[0] is not levels[0]:
            continue
        compute_s = float(found.priced.step_s[row] - found.priced.split_s["data"][row])
        level = dp(levels[0].n, sync=rule)
        if isinstance(rule, Served):
            rate = float(found.question.cluster.levels[-1].bytes_per_s)
            size = WORD * found.question.shape.parameters
            shards = min(level.n, server_shards(size, level.n, bytes_per_s=rate, compute_s=max(compute_s, 1e-6)))
            level = dp(level.n, sync=rule, via=ps(shards, colocated=True))
        strategy = Strategy(level, *plain.terms[1:])
        if str(strategy) not in seen and is_legal(strategy, facts=found.question.model_facts):
            seen.add(str(strategy))
            yield strategy, compute_s
        if len(seen) == MOST:
            return


def _row(
    strategy: Strategy, rule: SyncTerm, question: Any, slow: Sequence[SlowRanks], seed: int, compute_s: float
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "global_batch": question.global_batch,
        "steps": STEPS,
        "slow": slow,
        "noise": 0.0,
        "seed": seed,
        "optimizer": question.target.optimizer,
    }
    level = strategy.dp_levels[0]
    if isinstance(rule, Served):
        mine = simulate_served(strategy, question.shape, question.cluster, **options)
        together = Strategy(level.replace(sync=bsp()), *strategy.terms[1:])
        other = simulate_served(together, question.shape, question.cluster, **options)
        step_s, waiting, factor, bsp_s = mine.step_s, mine.waiting, mine.steps_factor, other.step_s
        staleness = mine.staleness_mean
    else:
        step_s, waiting, bsp_s = _quorum(
            strategy, rule, question.cluster, question.shape.parameters, slow, seed, compute_s
        )
        factor, staleness = local_slowdown(rule.period or 1, optimizer=question.target.optimizer), 0.0
    return {
        "strategy": str(strategy),
        "step_s": step_s,
        "step": seconds(step_s),
        "waiting": waiting,
        "staleness_mean": staleness,
        "steps_factor": factor,
        "bsp_step_s": bsp_s,
        "score_s": step_s * factor,
        "sooner": bsp_s / (step_s * factor),
    }


def _quorum(
    strategy: Strategy,
    rule: SyncTerm,
    cluster: Cluster,
    parameters: int,
    slow: Sequence[SlowRanks],
    seed: int,
    compute_s: float,
) -> tuple[float, float, float]:
    """Seconds of a step and the waiting of islands that take shares as they are free, and a step of all together."""
    level = strategy.dp_levels[0]
    inside = strategy.workers // level.n
    link = cluster.levels[-1] if cluster.devices > cluster.node else cluster.levels[0]
    model_s = parameters * WORD / inside / link.bytes_per_s + link.latency_s

    def slower(worker: int, ticket: int) -> float:
        ranks = range(worker * inside, (worker + 1) * inside)
        return max((each.factor for each in slow for rank in ranks if each.strikes(rank, ticket, seed)), default=1.0)

    rare = ServerCosts(
        ticket_s=[compute_s] * level.n,
        push_s=model_s / (rule.period or 1),
        pull_s=model_s / (rule.period or 1),
        shards=1,
    )
    always = ServerCosts(ticket_s=[compute_s] * level.n, push_s=model_s, pull_s=model_s, shards=level.n)
    mine = simulate_servers(asp(), rare, steps=STEPS, slower=slower, seed=seed)
    return mine.step_s, mine.waiting, simulate_servers(bsp(), always, steps=STEPS, slower=slower, seed=seed).step_s


def served_words(rows: Sequence[dict[str, Any]], straggler: Sequence[str]) -> list[str]:
    """Sentences, the recommendation last."""
    if not rows:
        return ["No plan that fits has replicas that this rule could keep apart: they shard the model among them."]
    disturbed = f"With {' and '.join(straggler)}" if straggler else "Without stragglers"
    lines = [f"{disturbed}, compared with the same replicas under bsp():"]
    for row in rows:
        stale = f", a gradient is {row['staleness_mean']:.1f} updates old" if row["staleness_mean"] else ""
        lines.append(
            f"{row['strategy']}: {row['step']} a step, workers wait {row['waiting']:.0%} of the time{stale}; "
            f"{row['steps_factor']:.3g} times the steps; at the target {row['sooner']:.3g} times as fast"
        )
    best = rows[0]
    lines.append(f"So: {best['strategy'] if best['sooner'] > 1 else 'bsp()'}")
    return lines
