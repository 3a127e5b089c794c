"""Tensor parallelism as a picture: a pair of matrices, the first cut by columns, the second by rows, with the
activations before, between and behind them, each in the colours of the ranks that hold it.
"""

from __future__ import annotations

from shoal.pictures.svg import FAINT, SOFT, Drawing, rank_colour
from shoal.strategy.terms.axes import tp

TALL_PX, WIDE_PX, INNER_PX = 96.0, 96.0, 144.0
"""Of activations: their tokens and their width; and the wider dimension between the two matrices."""
TOP_PX, STEP_PX = 40.0, 46.0
REPLICATED = "#e6e8eb"
"""What every rank holds."""


def tensor_panel(term: tp) -> Drawing:
    drawing, n = Drawing(), term.n
    cut = "tokens" if term.sequence else "samples" if term.batch else ""
    x = 0.0

    def labelled(title: str, below: str, wide: float, high: float) -> tuple[float, float]:
        nonlocal x
        drawing.words(x + wide / 2, TOP_PX - 10, title, size=13, anchor="middle", bold=True)
        drawing.words(x + wide / 2, TOP_PX + INNER_PX + 16, below, size=11, anchor="middle", colour=SOFT)
        place = x, TOP_PX + (INNER_PX - high) / 2
        x += wide
        return place

    def stream(title: str) -> None:
        at = labelled(title, f"1/{n} of the {cut}" if cut else "full on every rank", WIDE_PX, TALL_PX)
        _parts(drawing, *at, WIDE_PX, TALL_PX, n if cut else 0, columns=False)

    def between(over: str, under: str) -> None:
        nonlocal x
        middle = TOP_PX + INNER_PX / 2
        room = max(STEP_PX, 7.0 * max(len(over), len(under)) + 10)
        if over:
            drawing.words(x + room / 2, middle - 8, over, size=11.5, anchor="middle", bold=True)
            drawing.words(x + room / 2, middle + 18, under, size=11, anchor="middle", colour=SOFT)
        drawing.arrow(x + 6, middle, x + room - 6, middle)
        x += room

    stream("X")
    between("all-gather" if cut else "", f"of {cut}")
    at = labelled("A", "cut by columns", INNER_PX, WIDE_PX)
    _parts(drawing, *at, INNER_PX, WIDE_PX, n, columns=True)
    between("", "")
    at = labelled("f(XA)", "its columns stay where they are", INNER_PX, TALL_PX)
    _parts(drawing, *at, INNER_PX, TALL_PX, n, columns=True)
    between("", "")
    at = labelled("B", "cut by rows", WIDE_PX, INNER_PX)
    _parts(drawing, *at, WIDE_PX, INNER_PX, n, columns=False)
    between("reduce-scatter" if cut else "all-reduce", "of partial sums")
    stream("Z")
    drawing.notes(0, TOP_PX + INNER_PX + 48, _captions(term))
    return drawing


def _parts(drawing: Drawing, x: float, y: float, wide: float, high: float, parts: int, *, columns: bool) -> None:
    """A matrix, cut into as many columns or rows; with 0 parts uncut."""
    if not parts:
        drawing.box(x, y, wide, high, fill=REPLICATED, line=FAINT, tip="every rank")
        return
    for rank in range(parts):
        across, down = (wide / parts, high) if columns else (wide, high / parts)
        left, top = (x + rank * across, y) if columns else (x, y + rank * down)
        drawing.box(left, top, across, down, fill=rank_colour(rank), tip=f"rank {rank}")
        if min(across, down) >= 12:
            drawing.words(left + across / 2, top + down / 2 + 4, str(rank), size=11, anchor="middle")


def _captions(term: tp) -> list[str]:
    n = term.n
    moved = 2 * (n - 1) / n
    matrices = "fully connected layers" if term.batch else "every layer"
    way = "an all-gather and a reduce-scatter" if term.sequence or term.batch else "an all-reduce"
    lines = [
        f"rank r holds 1/{n} of the matrices of {matrices}, with their gradients and optimiser state",
        f"forward: {way} of the activations' b bytes, a rank sends 2b(n-1)/n = {moved:.2f} b; backward: the same again",
    ]
    if term.sequence:
        lines.append(f"norms, dropout and what else lies between: on 1/{n} of the tokens")
    elif term.batch:
        lines.append(f"all other layers: replicas, each with 1/{n} of the samples")
    else:
        lines.append("norms, dropout and what else lies between: on all tokens, by every rank")
    return lines
