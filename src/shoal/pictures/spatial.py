"""Spatial parallelism as a picture: the tiles of a plane, and what the rank in the middle fetches for a convolution."""

from __future__ import annotations

from shoal.common.numbers import even_part
from shoal.pictures.svg import SOFT, Drawing, rank_colour
from shoal.strategy.terms.axes import spatial

SIDE_PX, TOP_PX, HALO_PX, GAP_PX = 240.0, 40.0, 16.0, 90.0


def spatial_panel(term: spatial) -> Drawing:
    drawing = Drawing()
    rows, columns = term.grid
    _plane(drawing, 0, rows, columns, "the input of a convolution")
    _plane(drawing, SIDE_PX + GAP_PX, rows, columns, "its output")
    middle = TOP_PX + SIDE_PX / 2
    drawing.arrow(SIDE_PX + 16, middle, SIDE_PX + GAP_PX - 16, middle)
    rank = (rows // 2) * columns + columns // 2
    top, low = (SIDE_PX * at / rows for at in even_part(rows, rows, rank // columns))
    left, right = (SIDE_PX * at / columns for at in even_part(columns, columns, rank % columns))
    x0, x1 = max(0.0, left - HALO_PX), min(SIDE_PX, right + HALO_PX)
    y0, y1 = max(0.0, top - HALO_PX), min(SIDE_PX, low + HALO_PX)
    path = f"M{x0:.1f} {TOP_PX + y0:.1f}H{x1:.1f}V{TOP_PX + y1:.1f}H{x0:.1f}Z"
    drawing.elements.append(f"<path d='{path}' fill='none' stroke='#222222' stroke-width='2' stroke-dasharray='5 3'/>")
    cut = {"height": "rows", "width": "columns", "both": "tiles"}[term.split]
    drawing.notes(
        0,
        TOP_PX + SIDE_PX + 26,
        [
            f"each of {term.n} ranks computes its {cut} of every output; sizes may differ by one",
            f"dashed: what rank {rank} reads of the input; beyond its own part, the halo, other ranks send it",
            "backward returns the gradient of each halo to its owner; gradients of weights are summed over the ranks",
        ],
    )
    return drawing


def _plane(drawing: Drawing, x: float, rows: int, columns: int, title: str) -> None:
    drawing.words(x + SIDE_PX / 2, TOP_PX - 12, title, size=12, anchor="middle", colour=SOFT)
    high, wide = SIDE_PX / rows, SIDE_PX / columns
    for rank in range(rows * columns):
        left, top = x + rank % columns * wide, TOP_PX + rank // columns * high
        drawing.box(left, top, wide, high, fill=rank_colour(rank), tip=f"rank {rank}")
        drawing.words(left + wide / 2, top + high / 2 + 4, str(rank), size=12, anchor="middle")
