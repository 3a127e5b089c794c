"""A plan as a plain object: what the table prints, what `--json` gives and what the page draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.estimate.cost.inputs import SCHEDULES
from shoal.estimate.errors import (
    MEASURED_DEVICES,
    MEASURED_SCHEDULES,
    MEMORY_ERROR,
    ORIGIN,
    STEP_ERROR,
    UNMEASURED,
    around,
)
from shoal.estimate.target import OPTIMIZERS
from shoal.planning.candidates import FAMILIES, SEARCHED
from shoal.planning.counterfactual import Change
from shoal.planning.link_words import link_words
from shoal.planning.quantities import GB, digits, energy, gigabytes, seconds
from shoal.planning.rank import Plan, families, one_of_each, pareto
from shoal.strategy import contract

MOST_PARETO = 12


class NothingFits(ValueError):
    """No strategy fits; the text says by how much and what would."""


def plan_report(plan: Plan, *, top: int, changes: Sequence[Change]) -> dict[str, Any]:
    """The plan as it is printed, written as JSON and drawn: rows, families, Pareto front, changes, assumptions."""
    question, priced = plan.question, plan.priced
    best_of = families(plan)
    front = pareto(plan)
    cluster, device = question.cluster, question.cluster.device
    measure = {"time": "time to target", "step": "step time", "cost": "cost to target"}[question.by]
    asked = (
        f"batch {question.global_batch:,} x {question.shape.sequence:,} tokens: {len(priced):,} legal strategies, "
        f"{len(plan.ranked):,} fit; by {measure}"
    )
    return {
        "title": f"{question.shape.name} on {cluster.devices:,} x {device.name} ({cluster.name}), {asked}",
        "heading": f"{question.shape.name} on {cluster.devices:,} x {device.name}",
        "asked": f"Cluster {cluster.name}, {asked}.",
        "model": {"name": question.shape.name, "parameters": question.shape.parameters},
        "cluster": {
            "name": cluster.name,
            "devices": cluster.devices,
            "device": device.name,
            "memory_bytes": device.memory_bytes,
            "limit_bytes": priced.limit_bytes,
            "watts": question.device_watts,
        },
        "global_batch": question.global_batch,
        "sequence": question.shape.sequence,
        "by": question.by,
        "legal": len(priced),
        "fit": len(plan.ranked),
        "errors": {"step": STEP_ERROR, "memory": MEMORY_ERROR, "origin": ORIGIN},
        "assumptions": _assumptions(plan),
        "warnings": list(cluster.warnings),
        "link": link_words(plan) if question.sync is not None else [],
        "plans": [_row(plan, row) for row in one_of_each(plan, top)],
        "families": [{"family": name, **_row(plan, row)} for name, row in best_of.items()],
        "pareto": [_row(plan, row) for row in _spread(front)],
        "changes": [
            {"what": each.what, "outcome": each.outcome, "ratio": each.ratio, "strategy": each.strategy}
            for each in changes
        ],
    }


def _spread(front: list[int]) -> list[int]:
    """At most a dozen of the front, its ends among them."""
    if len(front) <= MOST_PARETO:
        return front
    step = (len(front) - 1) / (MOST_PARETO - 1)
    return [front[round(place * step)] for place in range(MOST_PARETO)]


def _assumptions(plan: Plan) -> list[str]:
    question, target = plan.question, plan.question.target
    limit, full = plan.priced.limit_bytes, question.cluster.device.memory_bytes
    steps = target.steps(question.global_batch)
    slower = ", ".join(f"{term} {target.slowdowns[type(term).__name__]:.3g}" for term in SEARCHED)
    known = {origin.removeprefix("compress ") for origin in target.origins}
    bounds = [str(term) for term in SEARCHED if not term.reaches_target and type(term).__name__ not in known]
    lines = [
        f"errors: a measured step lies about {STEP_ERROR:.0%} from the predicted one, memory {MEMORY_ERROR:.0%}: "
        f"{ORIGIN}",
        f"memory: at most {limit / GB:.1f} of {full / GB:.1f} GB a device is planned for; the rest is the margin for "
        "the prediction's error",
        f"steps to target: {steps:,.0f} at this batch = {target.samples / target.noise_batch:,.0f} x (1 + "
        f"{target.noise_batch:,.0f} / {question.global_batch:,})",
        *(f"{name}: {origin}" for name, origin in target.origins.items()),
        f"steps under compression, relative to dense: {slower}"
        + (f" (lower bounds for {', '.join(bounds)})" if bounds else ""),
        f"framework: profile {question.profile.name!r}; precision {question.precision}; {_memory_of_state(plan)}",
        "MFU: 6 operations a parameter and token, and attention's products, over the device's peak in this precision",
    ]
    if question.sync is not None:
        more = OPTIMIZERS[target.optimizer]
        lines.append(
            f"steps of islands: {more.doubling:.0%} more for every doubling of the period, with "
            f"{target.optimizer} ({more.origin})"
        )
    if question.device_watts is not None:
        whose = "the device's datasheet" if question.watts is None else "--watts"
        lines.append(
            f"energy: {question.device_watts:g} W a device ({whose}), at full power all the time; hosts, "
            "network and cooling are not in it"
        )
    if question.by == "cost" and not question.in_money:
        lines.append("cost: in device-hours; --price gives the price of a device for an hour")
    return lines


def _memory_of_state(plan: Plan) -> str:
    """Whose bytes are counted: a framework's that keeps 16-bit weights, or those of Shoal, whose `amp` does not."""
    profile = plan.question.profile
    if plan.question.precision == "fp32":
        return "all state in float32"
    parts = [
        f"{float(profile.parameter_bytes):g} (weights)",
        f"{float(profile.gradient_held_bytes):g} (gradients)",
        f"{float(profile.state_bytes):g} (optimizer)",
    ]
    return (
        f"bytes a parameter, as that framework holds them: {' + '.join(parts)}; Shoal's own amp keeps float32 weights: "
        "4 + 4 + 8"
    )


def _row(plan: Plan, row: int) -> dict[str, Any]:
    priced, rows = plan.priced, plan.priced.rows
    fits = bool(priced.fits[row])
    memory = float(priced.memory_bytes[row])
    found: dict[str, Any] = {
        "strategy": str(plan.strategy(row)),
        "family_of": FAMILIES[int(rows.family[row])],
        "fits": fits,
        "memory_bytes": memory,
        "memory": gigabytes(memory),
        "memory_range_bytes": around(memory, MEMORY_ERROR),
        "memory_split_bytes": {name: float(column[row]) for name, column in priced.memory_split_bytes.items()},
        "margin_bytes": priced.limit_bytes - memory,
    }
    if not fits:
        return found
    step_s, time_s = float(priced.step_s[row]), plan.time_s(row)
    split = {name: float(column[row]) for name, column in priced.split_s.items()}
    others = {name: value for name, value in split.items() if name != "compute"}
    largest = max(others, key=lambda name: others[name])
    energy_kwh = plan.energy_kwh(row)
    return {
        **found,
        **_speed(plan, step_s),
        "step_s": step_s,
        "step": seconds(step_s),
        "step_range_s": around(step_s, STEP_ERROR),
        "split_s": split,
        "steps_to_target": plan.steps(row),
        "time_to_target_s": time_s,
        "time": seconds(time_s),
        "cost": plan.cost(row),
        "cost_in": "money" if plan.question.in_money else "device-hours",
        "device_hours": plan.device_hours(row),
        "energy_kwh": energy_kwh,
        "energy": None if energy_kwh is None else energy(energy_kwh),
        "contract": str(contract(plan.strategy(row)).kind),
        "why": f"{split['compute'] / step_s:.0%} compute, {largest} {others[largest] / step_s:.0%}",
        "unmeasured": _unmeasured(plan, row),
    }


def _speed(plan: Plan, step_s: float) -> dict[str, Any]:
    """Tokens a second and device, and the part of the peak that the model's own operations make up."""
    question = plan.question
    shape, device = question.shape, question.cluster.device
    tokens = question.global_batch * shape.sequence / step_s / question.cluster.devices
    scores = 12 * shape.layers * shape.hidden * shape.sequence * (0.5 if shape.causal else 1.0)
    mfu = tokens * (6 * shape.active_parameters + scores) / device.peak(question.precision)
    return {"tokens_per_s_per_device": tokens, "mfu": mfu, "speed": f"{digits(tokens)} tok/s", "mfu_text": f"{mfu:.0%}"}


def _unmeasured(plan: Plan, row: int) -> list[str]:
    """What of a row no measured step stands behind."""
    rows, question = plan.priced.rows, plan.question
    there = {
        "context": rows.cp[row] > 1,
        "experts": question.shape.experts > 0,
        "schedule": SCHEDULES[int(rows.schedule[row])] not in MEASURED_SCHEDULES,
        "compression": rows.compress[row] > 0,
        "local": rows.local[row] > 0,
        "device": not question.cluster.device.name.startswith(MEASURED_DEVICES),
    }
    return [UNMEASURED[name] for name, so in there.items() if so]
