"""The picture of an analysis: the time bounds against the number of processors, and the work of a step by layer."""

from __future__ import annotations

from math import ceil, floor, log10
from typing import Any

from shoal.analysis.brent import time_bounds
from shoal.analysis.operator import Cost
from shoal.pictures.svg import FAINT, INK, SOFT, Drawing

LEFT_PX, TOP_PX = 24.0, 34.0
PLOT_WIDE_PX, PLOT_HIGH_PX = 430.0, 330.0
BAR_WIDE_PX, BAR_STEP_PX = 260.0, 19.0
MOST_BARS, MOST_LAYERS = 36, 24
BAND, LINE, FORWARD, BACKWARD = "#dbe8f6", "#2f6fb3", "#8ab8e6", "#f4b26f"


def analysis_svg(report: dict[str, Any]) -> str:
    """What `shoal.analysis.report` gives, as a self-contained SVG."""
    page = Drawing()
    title = f"{report['network']}, batch {report['batch']:,}"
    page.words(LEFT_PX, TOP_PX, title, size=17, bold=True)
    bounds = _bounds(report)
    page.put(bounds, LEFT_PX, TOP_PX + 22)
    page.put(_bars(report), LEFT_PX + bounds.width_px + 36, TOP_PX + 22)
    return page.document(f"Work and depth of {title}")


def _bounds(report: dict[str, Any]) -> Drawing:
    """Both axes are logarithmic; the one of processors goes on beyond W/D, where more of them no longer help."""
    drawing, step = Drawing(), report["totals"]["step"]
    cost = Cost(work=step["work"], depth=max(step["depth"], 1))
    left, top = 56.0, 26.0
    right = max(6, ceil(log10(max(step["parallelism"], 1))) + 1)
    low, high = floor(log10(cost.depth)), ceil(log10(max(cost.work + cost.depth, 10)))

    def place(processors: float, time: float) -> tuple[float, float]:
        x = left + PLOT_WIDE_PX * log10(processors) / right
        return x, top + PLOT_HIGH_PX * (high - log10(time)) / (high - low)

    drawing.words(0, 12, "Time of a step on p processors, in operations", size=13, bold=True)
    for power in range(low, high + 1, max(1, (high - low) // 7)):
        x, y = place(1, 10**power)
        drawing.curve([(x, y), (x + PLOT_WIDE_PX, y)], colour=FAINT, wide=0.6)
        drawing.words(x - 6, y + 4, f"1e{power}", size=10.5, anchor="end", colour=SOFT)
    for power in range(0, right + 1, max(1, right // 7)):
        x, y = place(10**power, 10**low)
        drawing.curve([(x, y), (x, y - PLOT_HIGH_PX)], colour=FAINT, wide=0.6)
        drawing.words(x, y + 15, f"1e{power}" if power else "1", size=10.5, anchor="middle", colour=SOFT)
    rows = [time_bounds(cost, round(10 ** (tenth / 10))) for tenth in range(10 * right + 1)]
    least = [place(row.processors, row.least) for row in rows]
    most = [place(row.processors, row.most) for row in rows]
    drawing.curve([*most, *reversed(least)], colour=BAND, filled=True)
    drawing.curve(most, colour=LINE)
    drawing.curve(least, colour=LINE)
    x, y = place(1, cost.depth)
    drawing.curve([(x, y), (x + PLOT_WIDE_PX, y)], colour=INK, wide=1.0, dashed=True)
    drawing.words(x + 6, y - 5, f"depth D = {cost.depth:,}: never faster", size=11)
    x, y = place(max(step["parallelism"], 1), 10**low)
    drawing.curve([(x, y), (x, y - PLOT_HIGH_PX)], colour=INK, wide=1.0, dashed=True)
    drawing.words(x - 5, y - PLOT_HIGH_PX + 14, f"W/D = {step['parallelism']:.3g}", size=11, anchor="end")
    notes = ["T lies between max(W/p, D) and W/p + D (Brent)", f"W = {cost.work:.3g} operations, D = {cost.depth:,}"]
    drawing.notes(0, top + PLOT_HIGH_PX + 40, notes)
    return drawing


def _bars(report: dict[str, Any]) -> Drawing:
    drawing, bars = Drawing(), _merged(report["groups"])
    names = max(6.3 * len(name) for name, _, _ in bars) + 8
    widest = max(forward + backward for _, forward, backward in bars) or 1
    total = sum(forward + backward for _, forward, backward in bars) or 1
    drawing.words(0, 12, "Work of a step by layer", size=13, bold=True)
    for x, name, fill in ((190.0, "forward", FORWARD), (268.0, "backward", BACKWARD)):
        drawing.box(x, 3, 11, 11, fill=fill)
        drawing.words(x + 16, 12, name, size=12, colour=SOFT)
    for number, (name, forward, backward) in enumerate(bars):
        y = 26 + BAR_STEP_PX * number
        drawing.words(names - 8, y + 11.5, name, size=11, anchor="end")
        first, second = (BAR_WIDE_PX * part / widest for part in (forward, backward))
        tip = f"{name}: forward {forward:.3g}, backward {backward:.3g} operations"
        drawing.box(names, y, first, BAR_STEP_PX - 5, fill=FORWARD, tip=tip)
        drawing.box(names + first, y, second, BAR_STEP_PX - 5, fill=BACKWARD, tip=tip)
        share = 100 * (forward + backward) / total
        drawing.words(names + first + second + 5, y + 11.5, f"{share:.1f}%", size=10.5, colour=SOFT)
    return drawing


def _merged(groups: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """(name, forward, backward): of each layer where these are few, else of each block; of too many blocks, those whose
    names begin alike are one.
    """
    if sum(len(group["layers"]) for group in groups) <= MOST_LAYERS:
        return [bar for group in groups for bar in _layer_bars(group)]
    bars = [
        (_span(group), group["count"] * group["forward"]["work"], group["count"] * group["backward_work"])
        for group in groups
    ]
    if len(bars) <= MOST_BARS:
        return bars
    merged: list[tuple[str, int, int]] = []
    for name, forward, backward in bars:
        begins = name.partition(".")[0]
        if merged and merged[-1][0] == begins:
            _, forward_before, backward_before = merged.pop()
            forward, backward = forward + forward_before, backward + backward_before
        merged.append((begins, forward, backward))
    if len(merged) <= MOST_BARS:
        return merged
    rest = merged[MOST_BARS - 1 :]
    return [*merged[: MOST_BARS - 1], (f"{len(rest)} more", sum(bar[1] for bar in rest), sum(bar[2] for bar in rest))]


def _layer_bars(group: dict[str, Any]) -> list[tuple[str, int, int]]:
    count, layers = group["count"], group["layers"]
    if len(layers) == 1:
        names = [_span(group)]
    else:
        inner = [layer["name"].removeprefix(f"{group['first']}.") for layer in layers]
        names = [f"{count} x {name}" if count > 1 else layer["name"] for name, layer in zip(inner, layers, strict=True)]
    backward = [layer["input_gradient"]["work"] + layer["weight_gradient"]["work"] for layer in layers]
    return [
        (name, count * layer["forward"]["work"], count * behind)
        for name, layer, behind in zip(names, layers, backward, strict=True)
    ]


def _span(group: dict[str, Any]) -> str:
    first, last = group["first"], group["last"]
    return first if first == last else f"{first} .. {last.rpartition('.')[2]}"
