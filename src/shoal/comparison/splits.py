"""Where a step goes, measured for all contestants alike: reading data, forward, backward and update on a core, waiting.

The rank that waits least stands for communication, of a pipeline also for its bubble; what the others wait longer is
waiting for the slowest rank. Times on a core are those of the rank's own thread.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.comm.ledger import Ledger
from shoal.comparison.protocol import WARMUP_STEPS
from shoal.strategy import Strategy, none, pp

PHASES = ("forward", "backward", "update", "rest")


def split_s(
    runs: Sequence[tuple[Sequence[Mapping[str, Any]], set[int]]], *, bubble: float = 0.0, pipeline: bool = False
) -> dict[str, float]:
    """Seconds of a step by part, means over runs.

    Args:
        runs: For each its ranks' facts, and the steps after which it evaluated.
        bubble: The part of a step that a pipeline's schedule makes its ranks wait.
        pipeline: Whether forwards and backwards take turns, so that the loss does not part them.
    """
    if pipeline:
        return _joined(split_s(runs, bubble=bubble))
    rows = [row for ranks, skipped in runs if (row := _of_run(ranks, skipped, bubble))]
    return {name: statistics.fmean(row.get(name, 0.0) for row in rows) for name in rows[0]} if rows else {}


def _joined(parts: dict[str, float]) -> dict[str, float]:
    if not parts:
        return {}
    found = {"data": parts.pop("data"), "passes": parts.pop("forward") + parts.pop("backward")}
    return found | parts


def _of_run(ranks: Sequence[Mapping[str, Any]], skipped: set[int], bubble: float) -> dict[str, float]:
    of_ranks = [found for rank in ranks if rank and (found := _of_rank(rank, skipped))]
    if not of_ranks:
        return {}
    parts = {name: statistics.fmean(each[name] for each in of_ranks) for name in ("data", *PHASES)}
    idle = [each["idle"] for each in of_ranks]
    if len(ranks) == 1:
        return {**parts, "off-core": idle[0]}
    wall = statistics.fmean(each["wall"] for each in of_ranks)
    least = min(idle)
    schedule = min(least, bubble * wall)
    return {
        **parts,
        "bubble": schedule,
        "communication": least - schedule,
        "waiting": max(0.0, statistics.fmean(idle) - least),
    }


def _of_rank(rank: Mapping[str, Any], skipped: set[int]) -> dict[str, float]:
    """Medians over the window, without steps that an evaluation follows."""
    kept = [n for n in range(WARMUP_STEPS, len(rank.get("cpu_s", ()))) if n + 1 not in skipped]
    if not kept:
        return {}
    wall = statistics.median(rank["wall_s"][n] for n in kept)
    cpu = min(wall, statistics.median(rank["cpu_s"][n] for n in kept))
    found = {"wall": wall, "data": min(wall, statistics.median(rank["data_s"][n] for n in kept))}
    phases = rank.get("phases") or []
    known = [phases[n] for n in kept if n < len(phases)]
    on_core = {name: statistics.median(row.get(name, [0, 0])[1] for row in known) if known else 0.0 for name in PHASES}
    busy = max(0.0, cpu - found["data"])
    measured = sum(on_core.values())
    # Medians do not add up to the median of the sum; their proportions count.
    found |= {name: busy * value / measured if measured else 0.0 for name, value in on_core.items()}
    if not measured:
        found["rest"] = busy
    return {**found, "idle": max(0.0, wall - found["data"] - busy)}


def bubble_of(strategy: Strategy | None) -> float:
    """The part of a step that the schedule of a pipeline leaves idle."""
    from shoal.estimate.pipeline.simulate import bubble_formula

    term = strategy.term(pp) if strategy is not None else None
    return (bubble_formula(term) or 0.0) if term is not None else 0.0


def imbalance(runs: Sequence[Sequence[Mapping[str, Any]]]) -> float | None:
    """Time on a core of the rank that works most over the mean of all; 1 is even."""
    found = []
    for ranks in runs:
        windows = [rank["cpu_s"][WARMUP_STEPS:] for rank in ranks if rank]
        busy = [statistics.median(window) for window in windows if window]
        if len(busy) > 1 and sum(busy):
            found.append(max(busy) / statistics.fmean(busy))
    return statistics.fmean(found) if found else None


def wire_s(ledger: Ledger, links: Sequence[Mapping[str, float] | None]) -> float | None:
    """Seconds of a step in which something is on the wire, hidden or not: what was sent, at the speed that the links
    had just before each run. What of it is exposed is in the split."""
    known = [link for link in links if link]
    if not known or not ledger.bytes:
        return None
    messages = sum(entry.messages for entry in ledger.entries.values())
    return statistics.fmean(ledger.bytes / link["bytes_per_s"] + messages * link["latency_s"] for link in known)


def compression(strategy: Strategy | None, sent_bytes: float | None, parameters: int) -> float | None:
    """How many times as much dense float32 gradients would be, where they are compressed."""
    if strategy is None or not sent_bytes:
        return None
    level = next((each for each in strategy.dp_levels if not isinstance(each.compress, none)), None)
    if level is None or strategy.world != level.n:
        return None
    return 2 * (level.n - 1) / level.n * 4 * parameters / sent_bytes


def consistency(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Updates between a gradient's parameters and its use; how far apart replicas were."""
    means, most, spreads = [], [], []
    for each in summaries:
        known = each.get("consistency") or {}
        if known.get("staleness"):
            means.append(known["staleness"]["mean"])
            most.append(known["staleness"]["max"])
        if known.get("widest_spread") is not None:
            spreads.append(known["widest_spread"])
        stages = each.get("staleness") or ()
        seen = [(int(late), times) for stage in stages for late, times in stage.items()]
        if seen:
            means.append(sum(late * times for late, times in seen) / sum(times for _, times in seen))
            most.append(max(late for late, _ in seen))
    return {
        "staleness_mean": statistics.fmean(means) if means else None,
        "staleness_max": max(most, default=None),
        "divergence": max(spreads, default=None),
    }
