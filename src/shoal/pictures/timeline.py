"""Pictures of a played pipeline: a lane a rank, time from left to right, as text for a terminal and as SVG for a page.

Both say the same: which micro-batch runs where and when, which pass it is, which chunk of the model, and who idles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

from shoal.estimate.pipeline.play import Box, Played, bubble_formula, bubble_formula_text
from shoal.strategy.terms import pp

Piece = tuple[str, str]
"""(what it shows: F, B, W, idle, label or ruler; its text)"""

MOST_COLUMNS = 100_000
"""A timeline in text is not wider than this, whatever the ratio of its longest to its shortest pass."""

COLOURS = {"F": (127, 178, 229), "B": (242, 166, 90), "W": (183, 165, 221)}
NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
LANE_PX, LANE_GAP_PX, LEFT_PX, TOP_PX = 30, 6, 70, 64
FONT = "font-family='system-ui, Helvetica, Arial, sans-serif'"


def captions(played: Played) -> list[str]:
    """What the picture shows, in numbers: the bubble beside its formula, and the activations that ranks keep."""
    term = pp(played.ranks, played.schedule, micro=max(played.micro, 1), chunks=played.chunks)
    formula, written = bubble_formula(term), bubble_formula_text(term)
    bubble = f"bubble: ranks idle {_percent(played.bubble)} of the time"
    if played.schedule == "pipedream":
        full = played.steady_bubble
        while_full = "never full in this run" if full is None else f"{_percent(full)} while the pipeline is full"
        bubble += f", start and end of the run included; {while_full}"
    elif formula is None:
        bubble += "; no closed formula"
    else:
        bubble += f"; formula {written} = {_percent(formula)}"
    return [bubble, _kept(played)]


def timeline_text(played: Played, *, width: int | None = None) -> str:
    """The timeline in letters: F3 is the forward of micro-batch 3, B its backward, W its weight gradients, = goes on,
    . is idle; with several chunks F3a and F3b are its passes through the first and the second. A timeline wider than
    `width` is broken into bands, one below the other.
    """
    lines = ("".join(text for _, text in row) for row in timeline_rows(played, width=width))
    return "\n".join(line.rstrip() for line in lines)


def timeline_rows(played: Played, *, width: int | None = None) -> Iterator[list[Piece]]:
    """The same line by line, in pieces that say what they show, for whoever wants to colour them."""
    boxes = [box for lane in played.lanes for box in lane]
    spans = [box.stop_s - box.start_s for box in boxes if box.stop_s > box.start_s]
    if not spans:
        return
    cell = max(len(_label(box, played)) for box in boxes) + 1
    per_s = min(cell / min(spans), MOST_COLUMNS / played.makespan_s)
    columns = max(1, round(played.makespan_s * per_s))
    rows = [_row(lane, played, columns, per_s, cell) for lane in played.lanes]
    margin = len(f"rank {played.ranks - 1}  ")
    band = columns if width is None else max(cell, (width - margin) // cell * cell)
    ruler = _ruler(columns, per_s * played.forward_s)
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


def timeline_svg(played: Played, title: str) -> str:
    """The timeline as a self-contained SVG: boxes coloured by pass, lighter from chunk to chunk, numbered by
    micro-batch, above an axis in units of a forward through one stage.
    """
    unit_s = played.forward_s or played.makespan_s or 1.0
    units = played.makespan_s / unit_s
    # A page wide if the numbers fit into boxes of one unit then, else as wide as they need.
    least_px = 3 + 7 * len(str(played.micro - 1))
    scale = _Scale(unit_s=unit_s, unit_px=max(least_px, min(36.0, 1080 / units)) if units else 36.0)
    lanes_px = played.ranks * (LANE_PX + LANE_GAP_PX)
    notes = captions(played)
    right_px = LEFT_PX + units * scale.unit_px
    # Wide enough for the words as well; a letter of the captions' size takes six and a half pixels at most.
    width_px = max(right_px + 20, LEFT_PX + 6.5 * max(map(len, notes)), LEFT_PX + 9 * len(title), 520)
    height_px = TOP_PX + lanes_px + 46 + 18 * len(notes)
    body = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width_px:.0f}' height='{height_px:.0f}' "
        f"viewBox='0 0 {width_px:.0f} {height_px:.0f}' {FONT} role='img'>",
        f"<title>{_xml(title)}</title>",
        "<rect width='100%' height='100%' fill='#ffffff'/>",
        f"<text x='{LEFT_PX}' y='26' font-size='16' font-weight='600' fill='#1c1e21'>{_xml(title)}</text>",
        *_legend(played),
        *_axis(scale, units, lanes_px),
    ]
    for rank, lane in enumerate(played.lanes):
        top_px = TOP_PX + rank * (LANE_PX + LANE_GAP_PX)
        body.append(
            f"<text x='{LEFT_PX - 10}' y='{top_px + 20}' font-size='13' text-anchor='end' fill='#1c1e21'>"
            f"rank {rank}</text>"
            f"<rect x='{LEFT_PX}' y='{top_px}' width='{units * scale.unit_px:.2f}' height='{LANE_PX}' fill='#eceef1'/>"
        )
        body += (_box(box, played, scale, top_px) for box in lane)
    for line, note in enumerate(notes):
        bottom_px = TOP_PX + lanes_px + 50 + 18 * line
        body.append(f"<text x='{LEFT_PX}' y='{bottom_px}' font-size='12.5' fill='#444950'>{_xml(note)}</text>")
    return "\n".join([*body, "</svg>", ""])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    unit_s: float
    unit_px: float

    def px(self, time_s: float) -> float:
        return LEFT_PX + time_s / self.unit_s * self.unit_px


def _box(box: Box, played: Played, scale: _Scale, top_px: int) -> str:
    start_px, stop_px = scale.px(box.start_s), scale.px(box.stop_s)
    number, wide_px = str(box.action.micro), stop_px - start_px
    rect = (
        f"<rect x='{start_px:.2f}' y='{top_px}' width='{wide_px:.2f}' height='{LANE_PX}' "
        f"fill='{_colour(box.action.kind[0], box.action.stage // played.ranks, played.chunks)}' "
        f"stroke='#ffffff' stroke-width='1'><title>{box.action}</title></rect>"
    )
    # A digit at this size is seven pixels wide; a number that does not fit is left to the tooltip.
    if wide_px < 7 * len(number):
        return rect
    return rect + (
        f"<text x='{(start_px + stop_px) / 2:.2f}' y='{top_px + 19}' font-size='12' text-anchor='middle' "
        f"fill='#1c1e21' pointer-events='none'>{number}</text>"
    )


def _legend(played: Played) -> Iterator[str]:
    present = {box.action.kind[0] for lane in played.lanes for box in lane}
    left_px = float(LEFT_PX)
    for kind in (kind for kind in COLOURS if kind in present):
        # At most six shades: with more chunks they show the direction, first to last.
        shown = sorted({round(step * (played.chunks - 1) / 5) for step in range(6)})
        for chunk in shown:
            yield (
                f"<rect x='{left_px:.0f}' y='38' width='13' height='13' fill='{_colour(kind, chunk, played.chunks)}'/>"
            )
            left_px += 15
        chunks = "" if played.chunks == 1 else f", chunks 0 to {played.chunks - 1}"
        words = ("input gradients" if kind == "B" and "W" in present else NAMES[kind]) + chunks
        yield f"<text x='{left_px + 3:.0f}' y='49' font-size='12' fill='#444950'>{words}</text>"
        left_px += 3 + 7 * len(words) + 16


def _axis(scale: _Scale, units: float, lanes_px: int) -> Iterator[str]:
    bottom_px = TOP_PX + lanes_px
    step = _tick(32 / scale.unit_px)
    for number in range(int(units / step + 1e-9) + 1):
        x = LEFT_PX + number * step * scale.unit_px
        yield f"<path d='M{x:.2f} {TOP_PX - 4}V{bottom_px + 2}' stroke='#d5d8dc' stroke-width='1'/>"
        yield (
            f"<text x='{x:.2f}' y='{bottom_px + 15}' font-size='11' text-anchor='middle' "
            f"fill='#606770'>{number * step:g}</text>"
        )
    yield (
        f"<text x='{LEFT_PX - 10}' y='{bottom_px + 15}' font-size='11' text-anchor='end' fill='#606770'>forwards</text>"
    )


def _colour(kind: str, chunk: int, chunks: int) -> str:
    paler = 0.68 * chunk / (chunks - 1) if chunks > 1 else 0.0
    return "#" + "".join(f"{round(part + (255 - part) * paler):02x}" for part in COLOURS[kind])


def _row(lane: tuple[Box, ...], played: Played, columns: int, per_s: float, cell: int) -> tuple[str, list[str]]:
    text = ["." if place % cell == 0 else " " for place in range(columns)]
    shows = ["idle"] * columns
    for box in lane:
        start, stop = round(box.start_s * per_s), round(box.stop_s * per_s)
        if stop > start:
            # The last column stays free, so that neighbours stand apart.
            text[start:stop] = (_label(box, played).ljust(stop - start, "=")[: stop - start - 1] + " ")[: stop - start]
            shows[start:stop] = [box.action.kind[0]] * (stop - start)
    return "".join(text), shows


def _label(box: Box, played: Played) -> str:
    chunk = box.action.stage // played.ranks
    letter = "" if played.chunks == 1 else chr(ord("a") + chunk) if played.chunks <= 26 else f".{chunk}"
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


def _kept(played: Played) -> str:
    most = played.in_flight
    what = "micro-batches"
    if played.chunks > 1:
        what += f" x chunks (1/{played.chunks} of a rank's layers each)"
    if len(set(most)) == 1:
        return f"in flight at most: {most[0]} {what} on every rank"
    if len(most) <= 16:
        return f"in flight at most, rank by rank: {', '.join(map(str, most))} {what}"
    low, high = min(most), max(most)
    return f"in flight at most: {high} {what} on rank {most.index(high)}, {low} on rank {most.index(low)}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"


def _xml(text: str) -> str:
    """Text for an XML document, without the characters that XML cannot hold."""
    return escape("".join(character for character in text if character.isprintable()))
