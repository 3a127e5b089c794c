"""A simulated step as a trace for ui.perfetto.dev or chrome://tracing: a process per class, a thread per rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shoal.estimate.simulate.step import Step

NAMES = {"F": "forward", "BW": "backward", "B": "backward, inputs", "W": "backward, weights"}
MOST_CLASSES = 8
"""Classes of replicas drawn at most, the slowest."""


def perfetto(steps: Sequence[Step]) -> str:
    """The trace as JSON, steps one after the other."""
    events: list[dict[str, Any]] = []
    begin_s = 0.0
    for number, step in enumerate(steps):
        slowest = sorted(range(len(step.counts)), key=lambda each: -float(step.passed_s[:, each].max()))[:MOST_CLASSES]
        for which in sorted(slowest):
            if not number:
                events += _names(step, which)
            events += _passes(step, which, begin_s=begin_s)
        begin_s += step.step_s
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(step: Step, which: int) -> list[dict[str, Any]]:
    alike = int(step.counts[which])
    size = step.costs.members * step.costs.term.n
    title = f"class {which}: {alike:,} replica{'s' if alike > 1 else ''} of {size} ranks"
    rows: list[dict[str, Any]] = [{"ph": "M", "pid": which, "name": "process_name", "args": {"name": title}}]
    for rank in range(step.costs.term.n):
        name = {"name": f"stage rank {rank}"}
        rows.append({"ph": "M", "pid": which, "tid": rank, "name": "thread_name", "args": name})
    return rows


def _passes(step: Step, which: int, *, begin_s: float) -> list[dict[str, Any]]:
    costs = step.costs
    found = []
    for (rank, action), start, stop in zip(step.order, step.starts_s[:, which], step.stops_s[:, which], strict=True):
        found.append(
            {
                "ph": "X",
                "pid": which,
                "tid": rank,
                "cat": action.kind,
                "ts": 1e6 * (begin_s + float(start)),
                "name": f"{NAMES[action.kind]} {action.micro}",
                "dur": 1e6 * float(stop - start),
                "args": {"stage": action.stage, "micro-batch": action.micro},
            }
        )
    for rank in range(costs.term.n):
        reduced_s = float(step.reduced_s[rank])
        data_s = reduced_s - costs.optimizer_s - float(step.passed_s[rank].max())
        after = (
            ("gradients", reduced_s - costs.optimizer_s - data_s, data_s),
            ("optimizer", reduced_s - costs.optimizer_s, costs.optimizer_s),
        )
        for name, start_s, span_s in after:
            if span_s > 0:
                found.append(
                    {
                        "ph": "X",
                        "pid": which,
                        "tid": rank,
                        "cat": name,
                        "name": name,
                        "ts": 1e6 * (begin_s + start_s),
                        "dur": 1e6 * span_s,
                    }
                )
    return found
