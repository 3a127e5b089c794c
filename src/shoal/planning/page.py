"""A plan as one HTML page that works offline: the best plan to copy, tables, time against memory, where the step goes,
what a change would do. The look and the plots are those of all pages (`common/pages.py`); what this page adds is in
`page/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shoal.common.pages import render
from shoal.estimate.cost.price import SPLIT
from shoal.planning.candidates import FAMILIES
from shoal.planning.quantities import amount, gigabytes, seconds
from shoal.planning.rank import Plan, pareto

PAGE = Path(__file__).with_name("page")
COLOURS = {
    "compute": "#4c78a8",
    "host": "#9aa5b1",
    "tensor": "#f58518",
    "context": "#eeca3b",
    "expert": "#b279a2",
    "data": "#e45756",
    "pipeline": "#72b7b2",
    "bubble": "#c3c9d1",
    "optimizer": "#54a24b",
    "other": "#9d755d",
}
MEANT = {
    "compute": "matrix products, attention and the rest of the kernels",
    "host": "the device waits for launches",
    "tensor": "messages of tp",
    "context": "messages of cp that attention does not hide",
    "expert": "messages of ep",
    "data": "gradients and gathered parameters that nothing hides",
    "pipeline": "messages between stages",
    "bubble": "stages that wait for each other",
    "optimizer": "the update",
    "other": "once a step: data, clipping; and waiting for the slowest node",
}
MOST_POINTS = 600
NO_CHANGE = 5e-4


def plan_page(plan: Plan, report: dict[str, Any]) -> str:
    """The page."""
    best = report["plans"][0]
    return render(
        PAGE / "plan.html.j2",
        data=_drawn(plan, report),
        script=PAGE / "plan.js",
        style=PAGE / "plan.css",
        title=report["heading"],
        subtitle=report["asked"],
        best=best,
        tiles=_tiles(plan, report),
        follow=_follow(plan, report),
        assumptions=report["assumptions"],
        changes=[_change(each) for each in report["changes"]],
    )


def _tiles(plan: Plan, report: dict[str, Any]) -> list[tuple[str, str]]:
    """The best plan's figures, each with what it is."""
    best, cluster = report["plans"][0], report["cluster"]
    least_s, most_s = best["step_range_s"]
    tiles = [
        (best["step"], f"a step; {seconds(least_s)} to {seconds(most_s)} by the validation's error"),
        (best["time"], f"to the target, in {best['steps_to_target']:,.0f} steps"),
        (
            best["memory"],
            f"a device, ±{report['errors']['memory']:.0%}; {gigabytes(cluster['limit_bytes'])} of "
            f"{gigabytes(cluster['memory_bytes'])} may be planned for",
        ),
        (amount(best), f"cost to the target{_paid_for(plan)}"),
    ]
    if best["energy"]:
        tiles.append((best["energy"], f"at {cluster['watts']:g} W a device"))
    return tiles


def _paid_for(plan: Plan) -> str:
    question = plan.question
    paid = [("devices", question.price_an_hour), ("energy", question.price_a_kwh)]
    return f", for {' and '.join(name for name, price in paid if price is not None)}" if question.in_money else ""


def _follow(plan: Plan, report: dict[str, Any]) -> list[str]:
    """Commands that go on from here."""
    strategy = report["plans"][0]["strategy"]
    where = f"-c {plan.question.cluster.name} -n {report['cluster']['devices']}"
    return [
        f"shoal explain '{strategy}'",
        f"shoal simulate {report['model']['name']} -s '{strategy}' {where} --batch {report['global_batch']}",
    ]


def _change(change: dict[str, Any]) -> dict[str, Any]:
    """A row of what-ifs: the figure, whether it is a gain, the strategy that it takes."""
    ratio, outcome, strategy = change["ratio"], change["outcome"], change["strategy"] or ""
    kind = "" if ratio is None or abs(ratio - 1) < NO_CHANGE else "gain" if ratio < 1 else "loss"
    figure, _, rest = outcome.partition(" ") if kind else ("", "", outcome)
    found = strategy if strategy and strategy in rest else ""
    return {
        "what": change["what"],
        "kind": kind,
        "figure": figure,
        "strategy": found,
        "rest": rest.partition(found)[0] if found else rest,
        "after": rest.partition(found)[2] if found else "",
    }


def _drawn(plan: Plan, report: dict[str, Any]) -> dict[str, Any]:
    """What the page's script draws."""
    rows = [*report["plans"], *report["families"]]
    shown = [name for name in SPLIT if any(row["split_s"][name] >= 1e-3 * row["step_s"] for row in rows if row["fits"])]
    return {
        "plans": [_row(row, number) for number, row in enumerate(report["plans"], start=1)],
        "families": [_row(row, number) for number, row in enumerate(report["families"], start=1)],
        "front": [_row(row, number) for number, row in enumerate(report["pareto"], start=1)],
        "points": _points(plan),
        "limit_bytes": float(plan.priced.limit_bytes),
        "errors": {
            "step": report["errors"]["step"],
            "memory": report["errors"]["memory"],
        },
        "money": any(row.get("cost_in") == "money" for row in rows),
        "energy": any(row.get("energy") for row in rows),
        "parts": [[name, name, COLOURS[name], MEANT[name]] for name in shown],
    }


def _row(row: dict[str, Any], number: int) -> dict[str, Any]:
    names = ("strategy", "fits", "memory_bytes", "memory")
    found: dict[str, Any] = {name: row[name] for name in names}
    found |= {"rank": number, "family": row.get("family") or row["family_of"], "title": row["strategy"]}
    if not row["fits"]:
        misses = f"does not fit: misses by {gigabytes(-row['margin_bytes'])}"
        return {
            **found,
            "why": "",
            "contract": "",
            "misses": misses,
            "step_s": None,
            "step": None,
            "time_s": None,
            "time": None,
            "cost": None,
        }
    return {
        **found,
        "why": row["why"],
        "contract": row["contract"],
        "step_s": row["step_s"],
        "step": row["step"],
        "time_s": row["time_to_target_s"],
        "time": row["time"],
        "cost": row["cost"],
        "costs": amount(row),
        "energy": row["energy"],
        "energy_j": row["energy_kwh"],
        "split_s": row["split_s"],
    }


def _points(plan: Plan) -> list[tuple[float, float, str, str, bool]]:
    """(memory, step, family, strategy, whether no other beats it in both) of some hundred strategies that fit."""
    front = set(pareto(plan))
    chosen = np.unique(np.linspace(0, len(plan.ranked) - 1, MOST_POINTS).astype(int))
    rows = [*(int(row) for row in plan.ranked[chosen] if int(row) not in front), *sorted(front)]
    priced = plan.priced
    return [
        (
            float(priced.memory_bytes[row]),
            float(priced.step_s[row]),
            FAMILIES[int(priced.rows.family[row])],
            str(plan.strategy(row)),
            row in front,
        )
        for row in rows
    ]
