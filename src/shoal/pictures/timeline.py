"""Pictures of a simulated pipeline: one lane per rank, time from left to right, as text and as SVG.

Both show the same: which micro-batch runs where and when, which pass it is, which chunk of the model, what is idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

from shoal.estimate.pipeline.simulate import Box, PipelineTimeline, bubble_formula, bubble_formula_text
from shoal.pictures.svg import SOFT, Drawing
from shoal.strategy.terms import pp

Piece = tuple[str, str]
"""(what it shows: F, B, W, idle, label or ruler; its text)"""

MOST_COLUMNS = 100_000
"""A timeline in text is not wider than this, whatever the ratio of its longest to its shortest pass."""

COLOURS = {"F": (127, 178, 229), "B": (242, 166, 90), "W": (183, 165, 221)}
NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
LANE_PX, LANE_GAP_PX, LEFT_PX, TOP_PX = 30, 6, 70, 64


def captions(timeline: PipelineTimeline) -> list[str]:
    """What the picture shows, in numbers: the bubble compared with its formula, and the activations that ranks keep."""
    term = pp(timeline.ranks, timeline.schedule, micro=max(timeline.micro, 1), chunks=timeline.chunks)
    formula, written = bubble_formula(term), bubble_formula_text(term)
    bubble = f"bubble: ranks idle {_percent(timeline.bubble)} of the time"
    if timeline.schedule == "pipedream":
        full = timeline.steady_bubble
        while_full = "never full in this run" if full is None else f"{_percent(full)} while the pipeline is full"
        bubble += f", start and end of the run included; {while_full}"
    elif formula is None:
        bubble += "; no closed formula"
    else:
        bubble += f"; formula {written} = {_percent(formula)}"
    return [bubble, _kept(timeline)]


def timeline_text(timeline: PipelineTimeline, *, width: int | None = None) -> str:
    """The timeline in letters: F3 is the forward of micro-batch 3, B its backward, W its weight gradients, = goes on,
    . is idle; with several chunks F3a and F3b are its passes through the first and the second. A timeline wider than
    `width` is broken into bands, one below the other.
    """
    lines = ("".join(text for _, text in row) for row in timeline_rows(timeline, width=width))
    return "\n".join(line.rstrip() for line in lines)


def timeline_rows(timeline: PipelineTimeline, *, width: int | None = None) -> Iterator[list[Piece]]:
    """The same line by line, in pieces that name what they show, so that a caller can colour them."""
    boxes = [box for lane in timeline.lanes for box in lane]
    spans = [box.stop_s - box.start_s for box in boxes if box.stop_s > box.start_s]
    if not spans:
        return
    cell = max(len(_label(box, timeline)) for box in boxes) + 1
    per_s = min(cell / min(spans), MOST_COLUMNS / timeline.makespan_s)
    columns = max(1, round(timeline.makespan_s * per_s))
    rows = [_row(lane, timeline, columns, per_s, cell) for lane in timeline.lanes]
    margin = len(f"rank {timeline.ranks - 1}  ")
    band = columns if width is None else max(cell, (width - margin) // cell * cell)
    ruler = _ruler(columns, per_s * timeline.forward_s)
    for start in range(0, columns, band):
        if start:
            yield []
        yield [("label", "time".ljust(margin)), ("ruler", ruler[start : start + band])]
        for rank, (text, shows) in enumerate(rows):
            pieces: list[Piece] = [("label", f"rank {rank}".ljust(margin))]
            for what, run in groupby(range(start, min(start + band, columns)), key=shows.__getitem__):
                places = list(run)
                pieces.append((what, text[places[0] : places[-1] + 1]))
            yield pieces


def timeline_svg(timeline: PipelineTimeline, title: str) -> str:
    """The timeline as a self-contained SVG: boxes coloured by pass, lighter from chunk to chunk, numbered by
    micro-batch, above an axis in units of a forward through one stage.
    """
    unit_s = timeline.forward_s or timeline.makespan_s or 1.0
    units = timeline.makespan_s / unit_s
    # A page wide if the numbers fit into boxes of one unit then, else as wide as they need.
    least_px = 3 + 7 * len(str(timeline.micro - 1))
    unit_px = max(least_px, min(36.0, 1080 / units)) if units else 36.0
    page = Drawing(width_px=500)
    page.words(LEFT_PX, 26, title, size=16, bold=True)
    _legend(page, timeline)
    bottom_px = TOP_PX + timeline.ranks * (LANE_PX + LANE_GAP_PX)
    _axis(page, units, unit_px, bottom_px)
    for rank, lane in enumerate(timeline.lanes):
        top_px = TOP_PX + rank * (LANE_PX + LANE_GAP_PX)
        page.words(LEFT_PX - 10, top_px + 20, f"rank {rank}", size=13, anchor="end")
        page.box(LEFT_PX, top_px, units * unit_px, LANE_PX, fill="#eceef1", line="none")
        for box in lane:
            start_px, stop_px = (LEFT_PX + time_s / unit_s * unit_px for time_s in (box.start_s, box.stop_s))
            colour = _colour(box.action.kind[0], box.action.stage // timeline.ranks, timeline.chunks)
            page.box(start_px, top_px, stop_px - start_px, LANE_PX, fill=colour, tip=str(box.action))
            # A digit at this size is seven pixels wide; a number that does not fit is left to the tooltip.
            if stop_px - start_px >= 7 * len(str(box.action.micro)):
                middle_px = (start_px + stop_px) / 2
                page.words(middle_px, top_px + 19, str(box.action.micro), anchor="middle", over_a_box=True)
    page.notes(LEFT_PX, bottom_px + 50, captions(timeline))
    return page.document(title)


def _legend(page: Drawing, timeline: PipelineTimeline) -> None:
    present = {box.action.kind[0] for lane in timeline.lanes for box in lane}
    left_px = float(LEFT_PX)
    for kind in (kind for kind in COLOURS if kind in present):
        # At most six shades: with more chunks they show the direction, first to last.
        for chunk in sorted({round(step * (timeline.chunks - 1) / 5) for step in range(6)}):
            page.box(left_px, 38, 13, 13, fill=_colour(kind, chunk, timeline.chunks), line="none")
            left_px += 15
        chunks = "" if timeline.chunks == 1 else f", chunks 0 to {timeline.chunks - 1}"
        words = ("input gradients" if kind == "B" and "W" in present else NAMES[kind]) + chunks
        page.words(left_px + 3, 49, words, colour=SOFT)
        left_px += 3 + 7 * len(words) + 16


def _axis(page: Drawing, units: float, unit_px: float, bottom_px: float) -> None:
    step = _tick(32 / unit_px)
    for number in range(int(units / step + 1e-9) + 1):
        x = LEFT_PX + number * step * unit_px
        page.curve([(x, TOP_PX - 4), (x, bottom_px + 2)], colour="#d5d8dc", wide=1)
        page.words(x, bottom_px + 15, f"{number * step:g}", size=11, anchor="middle", colour=SOFT)
    page.words(LEFT_PX - 10, bottom_px + 15, "forwards", size=11, anchor="end", colour=SOFT)


def _colour(kind: str, chunk: int, chunks: int) -> str:
    paler = 0.68 * chunk / (chunks - 1) if chunks > 1 else 0.0
    return "#" + "".join(f"{round(part + (255 - part) * paler):02x}" for part in COLOURS[kind])


def _row(
    lane: tuple[Box, ...], timeline: PipelineTimeline, columns: int, per_s: float, cell: int
) -> tuple[str, list[str]]:
    text = ["." if place % cell == 0 else " " for place in range(columns)]
    shows = ["idle"] * columns
    for box in lane:
        start, stop = round(box.start_s * per_s), round(box.stop_s * per_s)
        if stop > start:
            # The last column stays free, which separates neighbours.
            label = _label(box, timeline).ljust(stop - start, "=")
            text[start:stop] = (label[: stop - start - 1] + " ")[: stop - start]
            shows[start:stop] = [box.action.kind[0]] * (stop - start)
    return "".join(text), shows


def _label(box: Box, timeline: PipelineTimeline) -> str:
    chunk = box.action.stage // timeline.ranks
    letter = "" if timeline.chunks == 1 else chr(ord("a") + chunk) if timeline.chunks <= 26 else f".{chunk}"
    return f"{box.action.kind[0]}{box.action.micro}{letter}"


def _ruler(columns: int, unit_columns: float) -> str:
    ruler = [" "] * columns
    if unit_columns > 0:
        step = _tick((len(str(round(columns / unit_columns))) + 2) / unit_columns)
        for number in range(int(columns / unit_columns / step) + 1):
            place, mark = round(number * step * unit_columns), f"{number * step:g}"
            if place + len(mark) <= columns:
                ruler[place : place + len(mark)] = mark
    return "".join(ruler)


def _tick(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(max(least, 1)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _kept(timeline: PipelineTimeline) -> str:
    most = timeline.in_flight
    what = "micro-batches"
    if timeline.chunks > 1:
        what += f" x chunks (1/{timeline.chunks} of a rank's layers each)"
    if len(set(most)) == 1:
        return f"in flight at most: {most[0]} {what} on every rank"
    if len(most) <= 16:
        return f"in flight at most, rank by rank: {', '.join(map(str, most))} {what}"
    low, high = min(most), max(most)
    return f"in flight at most: {high} {what} on rank {most.index(high)}, {low} on rank {most.index(low)}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"
