"""A plan as one HTML page that works offline: tables, time against memory, where the step goes, what a change would do.

Everything is inside the file: styles, drawings as SVG with tips, and no script.
"""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10
from typing import Any

import numpy as np

from shoal.estimate.cost.price import SPLIT
from shoal.plan.enumerate import FAMILIES, families_of
from shoal.plan.rank import Plan, pareto
from shoal.plan.told import GB, seconds

COLOURS = {
    "compute": "#4c78a8", "host": "#9aa5b1", "tensor": "#f58518", "context": "#eeca3b", "expert": "#b279a2",
    "data": "#e45756", "pipeline": "#72b7b2", "bubble": "#d8dce2", "optimizer": "#54a24b", "other": "#bab0ac",
}  # fmt: skip
FAMILY_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d", "#ff9da6")
MOST_POINTS = 600
STYLE = """
body{font:15px/1.5 system-ui,Helvetica,Arial,sans-serif;color:#1c1e21;background:#fff;margin:2rem auto;max-width:1080px;
padding:0 1rem}h1{font-size:1.35rem;margin:0 0 .3rem}h2{font-size:1.05rem;margin:2rem 0 .5rem}p,li{color:#444950}
table{border-collapse:collapse;width:100%;font-size:.86rem}th{text-align:left;color:#6b7280;font-weight:500}
td,th{padding:.28rem .6rem .28rem 0;border-bottom:1px solid #e5e7eb;vertical-align:top}td.n{white-space:nowrap;
text-align:right;font-variant-numeric:tabular-nums}code{font:12.5px ui-monospace,Menlo,Consolas,monospace}
tr.no{color:#9aa5b1}svg{max-width:100%;height:auto}details{margin:.4rem 0}.key span{display:inline-block;
margin-right:1rem;font-size:.82rem;color:#444950}.key i{display:inline-block;width:.8rem;height:.8rem;
margin-right:.35rem;border-radius:2px;vertical-align:-1px}.bar{display:inline-block;height:.7rem;border-radius:2px}
"""


def plan_page(plan: Plan, told: dict[str, Any]) -> str:
    """The page."""
    best = told["plans"][0]
    parts = [
        f"<h1>{escape(told['title'])}</h1>",
        f"<p>Best: <code>{escape(best['strategy'])}</code>, {best['step']} a step, {best['time']} to the target, "
        f"{best['memory']} a device.</p>",
        "<details><summary>What this assumes</summary><ul>",
        *(f"<li>{escape(line)}</li>" for line in told["assumptions"]),
        "</ul></details>",
        "<h2>The best plans</h2>", _table(told["plans"], first="#"),
        "<h2>Time against memory</h2>",
        "<p>Each dot is a strategy that fits; the line joins those that no other beats in both.</p>", _scatter(plan),
        "<h2>The best of each family</h2>", _table(told["families"], first="family"),
        "<h2>Where the step goes</h2>", _bars([row for row in told["families"] if row["fits"]]),
        "<h2>What if</h2>", _changes(told["changes"]),
    ]  # fmt: skip
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Plan: {escape(told['model']['name'])}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _table(rows: list[dict[str, Any]], *, first: str) -> str:
    head = "".join(
        f"<th>{name}</th>" for name in (first, "step", "to target", "memory", "of it", "contract", "strategy")
    )
    body = []
    for number, row in enumerate(rows, start=1):
        label = escape(row.get("family") or str(number))
        code = f"<td><code>{escape(row['strategy'])}</code></td>"
        if row["fits"]:
            cells = "".join(f"<td class='n'>{row[name]}</td>" for name in ("step", "time", "memory"))
            body.append(f"<tr><td>{label}</td>{cells}<td>{row['why']}</td><td>{row['contract']}</td>{code}</tr>")
        else:
            missed = -row["margin_bytes"] / GB
            cells = f"<td></td><td></td><td class='n'>{row['memory']}</td><td>misses by {missed:.1f} GB</td><td></td>"
            body.append(f"<tr class='no'><td>{label}</td>{cells}{code}</tr>")
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"


def _scatter(plan: Plan) -> str:
    """Memory to the right, step time upwards, both logarithmic."""
    front = pareto(plan)
    chosen = np.unique(np.linspace(0, len(plan.ranked) - 1, MOST_POINTS).astype(int))
    dots = [int(row) for row in plan.ranked[chosen]]
    priced = plan.priced
    shown = [*dots, *front]
    x = LogAxis([float(priced.memory_bytes[row]) / GB for row in shown], start=60, stop=940)
    y = LogAxis([float(priced.step_s[row]) for row in shown], start=330, stop=20)
    names = [FAMILIES[code] for code in families_of(priced.rows.rows(np.array(shown, dtype=int)))]
    known = list(dict.fromkeys(names))
    colour = {name: FAMILY_COLOURS[place % len(FAMILY_COLOURS)] for place, name in enumerate(known)}
    drawn = []
    for value, at in x.ticks:
        drawn.append(f"<line x1='{at:.0f}' x2='{at:.0f}' y1='20' y2='330' stroke='#eceef1'/>")
        drawn.append(
            f"<text x='{at:.0f}' y='348' font-size='11' text-anchor='middle' fill='#6b7280'>{value:g} GB</text>"
        )
    for value, at in y.ticks:
        drawn.append(f"<line x1='60' x2='940' y1='{at:.0f}' y2='{at:.0f}' stroke='#eceef1'/>")
        label = f"{value:g} s"
        drawn.append(f"<text x='54' y='{at + 4:.0f}' font-size='11' text-anchor='end' fill='#6b7280'>{label}</text>")
    points = [(x.place(float(priced.memory_bytes[row]) / GB), y.place(float(priced.step_s[row]))) for row in shown]
    for row, (across, up), name in zip(shown, points, names, strict=True):
        of_front = row in front
        tip = f"{plan.strategy(row)}: {seconds(float(priced.step_s[row]))}, {priced.memory_bytes[row] / GB:.1f} GB"
        drawn.append(
            f"<circle cx='{across:.1f}' cy='{up:.1f}' r='{4.5 if of_front else 2.6}' fill='{colour[name]}' "
            f"fill-opacity='{1 if of_front else 0.45}'><title>{escape(tip)}</title></circle>"
        )
    line = " ".join(f"{across:.1f},{up:.1f}" for across, up in points[len(dots) :])
    drawn.append(f"<polyline points='{line}' fill='none' stroke='#1c1e21' stroke-width='1.2'/>")
    key = "".join(f"<span><i style='background:{colour[name]}'></i>{escape(name)}</span>" for name in known)
    title = "memory of a device, against the time of a step"
    words = f"<text x='500' y='372' font-size='12' text-anchor='middle' fill='#444950'>{title}</text>"
    return f"<svg viewBox='0 0 960 380' role='img'>{''.join(drawn)}{words}</svg><div class='key'>{key}</div>"


class LogAxis:
    """Places on a logarithmic axis, and its ticks at 1, 2 and 5."""

    def __init__(self, values: list[float], *, start: float, stop: float) -> None:
        self.low, self.high = min(values) / 1.08, max(values) * 1.08
        self.start, self.stop = start, stop

    def place(self, value: float) -> float:
        """Pixels of a value."""
        part = (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return self.start + part * (self.stop - self.start)

    @property
    def ticks(self) -> list[tuple[float, float]]:
        """(value, pixels)"""
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        wide = log10(self.high / self.low) > 2.5
        values = [first * 10.0**power for power in powers for first in ((1,) if wide else (1, 2, 5))]
        return [(value, self.place(value)) for value in values if self.low <= value <= self.high]


def _bars(rows: list[dict[str, Any]]) -> str:
    longest = max(row["step_s"] for row in rows)
    drawn = []
    for number, row in enumerate(rows):
        top, across = 8 + 26 * number, 150.0
        drawn.append(f"<text x='142' y='{top + 14}' font-size='12' text-anchor='end' fill='#444950'>"
                     f"{escape(row['family'])}</text>")  # fmt: skip
        for name in SPLIT:
            wide = 700 * row["split_s"][name] / longest
            tip = f"{row['family']}: {name} {seconds(row['split_s'][name])}"
            if wide >= 0.2:
                drawn.append(f"<rect x='{across:.1f}' y='{top}' width='{wide:.1f}' height='19' fill='{COLOURS[name]}'>"
                             f"<title>{escape(tip)}</title></rect>")  # fmt: skip
            across += wide
        drawn.append(f"<text x='{across + 6:.0f}' y='{top + 14}' font-size='12' fill='#444950'>{row['step']}</text>")
    key = "".join(f"<span><i style='background:{COLOURS[name]}'></i>{name}</span>" for name in SPLIT)
    return f"<svg viewBox='0 0 960 {16 + 26 * len(rows)}' role='img'>{''.join(drawn)}</svg><div class='key'>{key}</div>"


def _changes(changes: list[dict[str, Any]]) -> str:
    rows = []
    for change in changes:
        bar, ratio = "", change["ratio"]
        if ratio is not None:
            colour = "#54a24b" if ratio <= 1 else "#e45756"
            bar = (
                f"<span class='bar' style='width:{min(150.0, 150 * abs(ratio - 1)):.0f}px;background:{colour}'></span>"
            )
        rows.append(f"<tr><td>{escape(change['what'])}</td><td>{bar}</td><td>{escape(change['outcome'])}</td></tr>")
    return f"<table><tr><th>change</th><th></th><th>what becomes of the best plan</th></tr>{''.join(rows)}</table>"
