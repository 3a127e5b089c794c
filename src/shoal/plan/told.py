"""A plan as a plain object: what the table prints, what `--json` gives and what the page draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.plan.counterfactual import Change
from shoal.plan.enumerate import FAMILIES, families_of
from shoal.plan.rank import Plan, families, pareto
from shoal.strategy import contract

GB = 1e9
MOST_PARETO = 12


class NothingFits(ValueError):
    """No strategy fits; the text says by how much and what would."""


def told_plan(plan: Plan, *, top: int, changes: Sequence[Change]) -> dict[str, Any]:
    """All of it."""
    question, priced = plan.question, plan.priced
    best_of = families(plan)
    front = pareto(plan)
    measure = {"time": "time to target", "step": "step time", "cost": "cost to target"}[question.by]
    return {
        "title": f"{question.shape.name} on {question.cluster.devices:,} x {question.cluster.device.name} "
        f"({question.cluster.name}), batch {question.global_batch:,} x {question.shape.sequence:,} tokens: "
        f"{len(priced):,} legal strategies, {len(plan.ranked):,} fit; by {measure}",
        "model": {"name": question.shape.name, "parameters": question.shape.parameters},
        "cluster": {"name": question.cluster.name, "devices": question.cluster.devices,
                    "device": question.cluster.device.name, "memory_bytes": question.cluster.device.memory_bytes,
                    "limit_bytes": priced.limit_bytes},
        "global_batch": question.global_batch, "sequence": question.shape.sequence, "by": question.by,
        "legal": len(priced), "fit": len(plan.ranked),
        "assumptions": _assumptions(plan),
        "plans": [_row(plan, int(row)) for row in plan.ranked[:top]],
        "families": [{"family": name, **_row(plan, row)} for name, row in best_of.items()],
        "pareto": [_row(plan, row) for row in _spread(front)],
        "changes": [
            {"what": each.what, "outcome": each.outcome, "ratio": each.ratio, "strategy": each.strategy}
            for each in changes
        ],
    }  # fmt: skip


def _spread(front: list[int]) -> list[int]:
    """At most a dozen of the front, its ends among them."""
    if len(front) <= MOST_PARETO:
        return front
    step = (len(front) - 1) / (MOST_PARETO - 1)
    return [front[round(place * step)] for place in range(MOST_PARETO)]


def _assumptions(plan: Plan) -> list[str]:
    question, target = plan.question, plan.question.target
    limit, whole = plan.priced.limit_bytes, question.cluster.device.memory_bytes
    steps = target.steps(question.global_batch)
    told = [
        f"memory: at most {limit / GB:.1f} of {whole / GB:.1f} GB a device is planned for; the rest is the margin for "
        "the prediction's error",
        f"steps to target: {steps:,.0f} at this batch = {target.samples / target.noise_batch:,.0f} x (1 + "
        f"{target.noise_batch:,.0f} / {question.global_batch:,})",
        *(f"{name}: {origin}" for name, origin in target.origins.items()),
        f"framework: profile {question.profile.name!r}; precision {question.precision}",
    ]
    if question.by == "cost" and question.price_an_hour is None:
        told.append("cost: in device-hours; --price gives the price of a device for an hour")
    return told


def _row(plan: Plan, row: int) -> dict[str, Any]:
    priced, rows = plan.priced, plan.priced.rows
    fits = bool(priced.fits[row])
    memory = float(priced.memory_bytes[row])
    found: dict[str, Any] = {
        "strategy": str(plan.strategy(row)),
        "family_of": FAMILIES[int(families_of(rows.rows(slice(row, row + 1)))[0])],
        "fits": fits,
        "memory_bytes": memory,
        "memory": f"{memory / GB:.1f} GB",
        "memory_split_bytes": {name: float(column[row]) for name, column in priced.memory_split_bytes.items()},
        "margin_bytes": priced.limit_bytes - memory,
    }
    if not fits:
        return found
    step_s, time_s = float(priced.step_s[row]), plan.time_s(row)
    split = {name: float(column[row]) for name, column in priced.split_s.items()}
    beside = {name: value for name, value in split.items() if name != "compute"}
    largest = max(beside, key=lambda name: beside[name])
    money = plan.question.price_an_hour is not None
    return {
        **found,
        "step_s": step_s, "step": seconds(step_s), "split_s": split, "steps_to_target": plan.steps(row),
        "time_to_target_s": time_s, "time": seconds(time_s), "cost": plan.cost(row),
        "cost_in": "money" if money else "device-hours",
        "contract": str(contract(plan.strategy(row)).kind),
        "why": f"{split['compute'] / step_s:.0%} compute, {largest} {beside[largest] / step_s:.0%}",
    }  # fmt: skip


def seconds(value: float) -> str:
    """A time as people say it."""
    for limit, unit, name in ((0.1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (2 * 86400, 3600, "h")):
        if value < limit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 86400:.3g} days"
