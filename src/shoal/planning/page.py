"""A plan as one HTML page that works offline: the best plan to copy, tables, time against memory, where the step goes,
what a change would do.

Everything is inside the file: styles, and drawings whose places are parts of their width, so that words stay readable
on a narrow screen; no script.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

import numpy as np

from shoal.estimate.cost.price import SPLIT
from shoal.planning.candidates import FAMILIES
from shoal.planning.quantities import GB, amount, gigabytes, seconds
from shoal.planning.rank import Plan, pareto

COLOURS = {
    "compute": "#4c78a8", "host": "#9aa5b1", "tensor": "#f58518", "context": "#eeca3b", "expert": "#b279a2",
    "data": "#e45756", "pipeline": "#72b7b2", "bubble": "#c3c9d1", "optimizer": "#54a24b", "other": "#9d755d",
}  # fmt: skip
MEANT = {
    "compute": "matrix products, attention and the rest of the kernels", "host": "the device waits for launches",
    "tensor": "messages of tp", "context": "messages of cp that attention does not hide", "expert": "messages of ep",
    "data": "gradients and gathered parameters that nothing hides", "pipeline": "messages between stages",
    "bubble": "stages that wait for each other", "optimizer": "the update",
    "other": "once a step: data, clipping; and waiting for the slowest node",
}  # fmt: skip
FAMILY_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d", "#ff9da6")
MOST_POINTS = 600
PLOT_PX = 320


def plan_page(plan: Plan, report: dict[str, Any]) -> str:
    """The page."""
    parts = [
        f"<h1>{escape(report['heading'])}</h1><p>{escape(report['asked'])}</p>",
        *_best(plan, report),
        "<details><summary>What this assumes</summary><ul>",
        *(f"<li>{escape(line)}</li>" for line in report["assumptions"]),
        "</ul></details>",
        "<h2>The best plans</h2>", _table(report["plans"], report, first="#"),
        "<h2>Time against memory</h2>",
        "<p>Each dot is a strategy that fits; the line joins those that no other beats in both. Dots name themselves "
        "when pointed at.</p>", _scatter(plan),
        "<h2>The best of each family</h2>", _table(report["families"], report, first="family"),
        "<h2>Where the step goes</h2>", _bars([row for row in report["families"] if row["fits"]]),
        "<h2>What if</h2>", _changes(report["changes"]),
        "<h2>The front of time against memory</h2>", _table(report["pareto"], report, first="#"),
    ]  # fmt: skip
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Plan: {escape(report['model']['name'])}</title><style>\n{style}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _best(plan: Plan, report: dict[str, Any]) -> list[str]:
    """The plan to copy, its figures with their errors, and what can be done with it."""
    best, cluster = report["plans"][0], report["cluster"]
    least_s, most_s = best["step_range_s"]
    tiles = [
        (best["step"], f"a step; {seconds(least_s)} to {seconds(most_s)} by the validation's error"),
        (best["time"], f"to the target, in {best['steps_to_target']:,.0f} steps"),
        (best["memory"], f"a device, ±{report['errors']['memory']:.0%}; {gigabytes(cluster['limit_bytes'])} of "
                         f"{gigabytes(cluster['memory_bytes'])} may be planned for"),
        (amount(best), f"cost to the target{_paid_for(plan)}"),
    ]  # fmt: skip
    if best["energy"]:
        tiles.append((best["energy"], f"at {cluster['watts']:g} W a device"))
    beyond = best["unmeasured"]
    strategy, where = best["strategy"], f"-c {plan.question.cluster.name} -n {cluster['devices']}"
    follow = [
        f"shoal explain '{strategy}'",
        f"shoal simulate {report['model']['name']} -s '{strategy}' {where} --batch {report['global_batch']}",
    ]
    return [
        "<p>The best plan (one click selects it):</p>", f"<code class='copy best'>{escape(strategy)}</code>",
        "<div class='tiles'>",
        *(f"<div><b>{escape(big)}</b><span>{escape(small)}</span></div>" for big, small in tiles),
        "</div>",
        f"<p>Warning: it uses features with little validation data: {escape(', '.join(beyond))}.</p>" if beyond else "",
        "<details><summary>Look at it closer</summary>",
        *(f"<code class='copy'>{escape(line)}</code>" for line in follow), "</details>",
    ]  # fmt: skip


def _paid_for(plan: Plan) -> str:
    question = plan.question
    paid = [("devices", question.price_an_hour), ("energy", question.price_a_kwh)]
    return f", for {' and '.join(name for name, price in paid if price is not None)}" if question.in_money else ""


def _table(rows: list[dict[str, Any]], report: dict[str, Any], *, first: str) -> str:
    """Two lines for each row: figures, and under them the strategy, which may wrap. Costs yield to narrow screens."""
    money = any(row.get("cost_in") == "money" for row in rows)
    energy = any(row.get("energy") for row in rows)
    names = [first, f"step ±{report['errors']['step']:.0%}", "to target", f"memory ±{report['errors']['memory']:.0%}"]
    more = [*(["cost"] if money else []), *(["energy"] if energy else [])]
    body = []
    for number, row in enumerate(rows, start=1):
        label, code = escape(row.get("family") or str(number)), f"<code>{escape(row['strategy'])}</code>"
        if row["fits"]:
            figures = [row["step"], row["time"], row["memory"]]
            priced = [{"cost": amount(row), "energy": row["energy"] or ""}[name] for name in more]
            small = f"{row['why']}; {row['contract']}"
        else:
            figures, priced = ["", "", row["memory"]], [""] * len(more)
            small = f"does not fit: misses by {gigabytes(-row['margin_bytes'])}"
        dim = "" if row["fits"] else " no"
        cells = [*(f"<td>{each}</td>" for each in figures), *(f"<td class='w'>{each}</td>" for each in priced)]
        body.append(f"<tr class='{dim.strip()}'><td>{label}</td>{''.join(cells)}</tr>")
        body.append(
            f"<tr class='more{dim}'><td colspan='{len(names) + len(more)}'>{code} "
            f"<small>{escape(small)}</small></td></tr>"
        )
    head = "".join([*(f"<th>{name}</th>" for name in names), *(f"<th class='w'>{name}</th>" for name in more)])
    return f"<div class='roll'><table><tr>{head}</tr>{''.join(body)}</table></div>"


def _scatter(plan: Plan) -> str:
    """Memory to the right, step time upwards, both logarithmic; places across are parts of the width."""
    front = pareto(plan)
    chosen = np.unique(np.linspace(0, len(plan.ranked) - 1, MOST_POINTS).astype(int))
    dots = [int(row) for row in plan.ranked[chosen]]
    priced = plan.priced
    shown = [*(row for row in dots if row not in front), *front]
    x = LogAxis([float(priced.memory_bytes[row]) / GB for row in shown], start=0, stop=100)
    unit, unit_s = _unit(float(np.median(priced.step_s[shown])))
    y = LogAxis([float(priced.step_s[row]) / unit_s for row in shown], start=PLOT_PX, stop=0)
    names = [FAMILIES[code] for code in priced.rows.family[shown]]
    known = list(dict.fromkeys(names))
    colour = {name: FAMILY_COLOURS[place % len(FAMILY_COLOURS)] for place, name in enumerate(known)}
    drawn = []
    for value, at in x.ticks:
        drawn.append(f"<line class='grid' x1='{at:.2f}%' x2='{at:.2f}%' y1='0' y2='{PLOT_PX}'/>")
        label = gigabytes(value * GB).replace(".0 ", " ")
        drawn.append(f"<text x='{at:.2f}%' y='{PLOT_PX + 17}' text-anchor='middle'>{label}</text>")
    for value, at in y.ticks:
        drawn.append(f"<line class='grid' x1='0' x2='100%' y1='{at:.1f}' y2='{at:.1f}'/>")
        drawn.append(f"<text x='-6' y='{at + 4:.1f}' text-anchor='end'>{value:g} {unit}</text>")
    limit = priced.limit_bytes / GB
    if limit <= x.high:
        at = x.place(limit)
        drawn.append(f"<line class='limit' x1='{at:.2f}%' x2='{at:.2f}%' y1='0' y2='{PLOT_PX}'>"
                     f"<title>what may be planned for: {limit:.1f} GB</title></line>")  # fmt: skip
    points = [
        (x.place(float(priced.memory_bytes[row]) / GB), y.place(float(priced.step_s[row]) / unit_s)) for row in shown
    ]
    line = points[len(shown) - len(front) :]
    for (across, up), (then, there) in pairwise(line):
        drawn.append(f"<line class='front' x1='{across:.2f}%' y1='{up:.1f}' x2='{then:.2f}%' y2='{there:.1f}'/>")
    for place, (row, (across, up), name) in enumerate(zip(shown, points, names, strict=True)):
        of_front = place >= len(shown) - len(front)
        tip = (
            f"{plan.strategy(row)}: {seconds(float(priced.step_s[row]))}, {gigabytes(float(priced.memory_bytes[row]))}"
        )
        look = "class='front' r='5'" if of_front else "r='2.8' fill-opacity='.45'"
        drawn.append(
            f"<circle cx='{across:.2f}%' cy='{up:.1f}' {look} fill='{colour[name]}'>"
            f"<title>{escape(tip)}</title></circle>"
        )
    words = (
        f"<text x='50%' y='{PLOT_PX + 36}' text-anchor='middle'>memory of a device, against the time of a step</text>"
    )
    key = "".join(f"<span><i style='background:{colour[name]}'></i>{escape(name)}</span>" for name in known)
    return (
        f"<div class='plot'><svg height='{PLOT_PX}' role='img'>{''.join(drawn)}{words}</svg></div>"
        f"<div class='key'>{key}</div>"
    )


def _unit(typical_s: float) -> tuple[str, float]:
    return ("ms", 1e-3) if typical_s < 0.3 else ("s", 1.0) if typical_s < 300 else ("min", 60.0)


class LogAxis:
    """Places on a logarithmic axis, and its ticks."""

    def __init__(self, values: list[float], *, start: float, stop: float) -> None:
        self.low, self.high = min(values) / 1.08, max(values) * 1.08
        self.start, self.stop = start, stop

    def place(self, value: float) -> float:
        """Where a value lies."""
        part = (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return self.start + part * (self.stop - self.start)

    @property
    def ticks(self) -> list[tuple[float, float]]:
        """(value, place): at 1, 2 and 5; at 1 alone where that gives too many, at every digit where too few."""
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for firsts in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            values = [first * 10.0**power for power in powers for first in firsts]
            found = [(value, self.place(value)) for value in values if self.low <= value <= self.high]
            if len(found) >= 3:
                break
        return found


def _bars(rows: list[dict[str, Any]]) -> str:
    longest = max(row["step_s"] for row in rows)
    shown = [name for name in SPLIT if any(row["split_s"][name] >= 1e-3 * row["step_s"] for row in rows)]
    drawn = []
    for row in rows:
        parts = []
        for name in SPLIT:
            tip = f"{name}: {seconds(row['split_s'][name])}, {row['split_s'][name] / row['step_s']:.1%} of the step"
            wide = 100 * row["split_s"][name] / longest
            if wide >= 0.02:
                parts.append(f"<i style='width:{wide:.2f}%;background:{COLOURS[name]}' title='{escape(tip)}'></i>")
        drawn.append(f"<span class='name'>{escape(row['family'])}</span><div>{''.join(parts)}</div>"
                     f"<span>{row['step']}</span>")  # fmt: skip
    key = "".join(
        f"<span title='{escape(MEANT[name])}'><i style='background:{COLOURS[name]}'></i>{name}</span>" for name in shown
    )
    listed = "".join(f"<li>{name}: {escape(MEANT[name])}</li>" for name in shown)
    return (
        f"<div class='bars'>{''.join(drawn)}</div><div class='key'>{key}</div>"
        f"<details><summary>What the parts are</summary><ul>{listed}</ul></details>"
    )


def _changes(changes: list[dict[str, Any]]) -> str:
    rows = []
    for change in changes:
        ratio, outcome = change["ratio"], escape(change["outcome"])
        kind = "" if ratio is None or abs(ratio - 1) < 5e-4 else "gain" if ratio < 1 else "loss"
        if change["strategy"]:
            code = escape(change["strategy"])
            outcome = outcome.replace(code, f"<code>{code}</code>")
        figure, space, rest = outcome.partition(" ") if kind else ("", "", outcome)
        rows.append(f"<tr><td>{escape(change['what'])}</td><td><b class='{kind}'>{figure}</b>{space}{rest}</td></tr>")
    return f"<table class='what'>{''.join(rows)}</table>"
