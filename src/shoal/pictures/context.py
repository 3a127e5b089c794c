"""Context parallelism as a picture. Ring: the products of chunks of queries with chunks of keys, each in the colour of
the rank that computes it and numbered by the hop after which its keys are there. Ulysses: positions and heads before
and after the all-to-all.
"""

from __future__ import annotations

from math import cos, pi, sin

from shoal.pictures.svg import SOFT, Drawing, rank_colour
from shoal.strategy.terms.axes import cp

SIDE_PX, TOP_PX, LEFT_PX = 256.0, 44.0, 74.0


def context_panel(term: cp) -> Drawing:
    return _ring(term.n) if term.method == "ring" else _ulysses(term.n)


def holder(chunk: int, ranks: int) -> int:
    """The rank of a chunk: of two chunks for each, an early and a late one (`parallel/context/sequence.py`)."""
    return min(chunk, 2 * ranks - 1 - chunk)


def hop(*, query_rank: int, key_rank: int, ranks: int) -> int:
    """How far keys have travelled when a rank meets them: each hop is one rank further."""
    return (query_rank - key_rank) % ranks


def _ring(n: int) -> Drawing:
    drawing, chunks = Drawing(), 2 * n
    cell = SIDE_PX / chunks
    drawing.words(LEFT_PX + SIDE_PX / 2, TOP_PX - 26, "keys and values, in 2n chunks", size=12, anchor="middle")
    drawing.words(0, TOP_PX + SIDE_PX / 2 + 4, "queries", size=12)
    for chunk in range(chunks):
        rank = holder(chunk, n)
        at = (chunk + 0.5) * cell
        drawing.box(LEFT_PX + chunk * cell, TOP_PX - 18, cell, 14, fill=rank_colour(rank), tip=f"rank {rank}")
        drawing.box(LEFT_PX - 18, TOP_PX + chunk * cell, 14, cell, fill=rank_colour(rank), tip=f"rank {rank}")
        if cell >= 12:
            drawing.words(LEFT_PX + at, TOP_PX - 7.5, str(rank), size=10, anchor="middle")
            drawing.words(LEFT_PX - 11, TOP_PX + at + 3.5, str(rank), size=10, anchor="middle")
    for row in range(chunks):
        for column in range(chunks):
            _product(drawing, row, column, n, cell)
    _circle(drawing, n, LEFT_PX + SIDE_PX + 150, TOP_PX + SIDE_PX / 2 - 8)
    drawing.notes(
        0,
        TOP_PX + SIDE_PX + 32,
        [
            f"rank r holds chunks r and {chunks - 1} - r of {chunks}: an early and a late one, so causal work is even",
            f"every rank computes {chunks - 1} full products and 2 halves (triangles); what is masked is left out",
            "a number is the hop after which the keys are there; the next hop travels while they are used",
            f"each hop sends the keys and values of one rank, n - 1 = {n - 1} hops forward; backward as many, and the "
            "gradients of both",
        ],
    )
    return drawing


def _product(drawing: Drawing, row: int, column: int, n: int, cell: float) -> None:
    x, y = LEFT_PX + column * cell, TOP_PX + row * cell
    if column > row:
        drawing.box(x, y, cell, cell, fill="#f4f5f6", line="#ffffff")
        return
    rank = holder(row, n)
    hops = hop(query_rank=rank, key_rank=holder(column, n), ranks=n)
    if column == row:
        drawing.box(x, y, cell, cell, fill="#f4f5f6", line="#ffffff")
        drawing.elements.append(
            f"<polygon points='{x:.1f},{y:.1f} {x:.1f},{y + cell:.1f} {x + cell:.1f},{y + cell:.1f}' "
            f"fill='{rank_colour(rank)}'/>"
        )
    else:
        drawing.box(x, y, cell, cell, fill=rank_colour(rank), tip=f"rank {rank}, after {hops} hops")
    if cell >= 14:
        shift = 0.18 * cell if column == row else 0.0
        size = min(12.0, cell * 0.5)
        drawing.words(x + cell / 2 - shift, y + cell / 2 + shift + 4, str(hops), size=size, anchor="middle")


def _circle(drawing: Drawing, n: int, x: float, y: float) -> None:
    """The ranks in a ring, each sending to the next."""
    around = 84.0 if n > 2 else 56.0
    size = max(15.0, min(30.0, 2 * pi * around / n - 14))

    def at(place: float) -> tuple[float, float]:
        angle = 2 * pi * place / n - pi / 2
        return x + around * cos(angle), y + around * sin(angle)

    # How much of the way between two ranks their boxes take.
    taken = 0.82 * size / (2 * pi * around / n)
    for rank in range(n):
        left, top = at(rank)
        drawing.box(left - size / 2, top - size / 2, size, size, fill=rank_colour(rank), tip=f"rank {rank}")
        drawing.words(left, top + 4, str(rank), size=min(12.0, size * 0.6), anchor="middle")
        if n == 2:
            side = -9 if rank else 9
            other = at(1 - rank)[1]
            down = 1 if other > top else -1
            drawing.arrow(x + side, top + down * size / 2, x + side, other - down * size / 2)
        else:
            drawing.arrow(*at(rank + taken), *at(rank + 1 - taken))
    drawing.words(x, y + around + size / 2 + 22, "keys and values travel", size=11.5, anchor="middle", colour=SOFT)


def _ulysses(n: int) -> Drawing:
    drawing, side, gap = Drawing(), 180.0, 120.0
    part = side / n
    titles = ("queries, keys, values", "attention", "its output")
    for place, (title, by_heads) in enumerate(zip(titles, (False, True, False), strict=True)):
        x = place * (side + gap) + 20
        drawing.words(x + side / 2, 14, title, size=13, anchor="middle", bold=True)
        drawing.words(x + side / 2, TOP_PX - 6, "heads", size=11, anchor="middle", colour=SOFT)
        if not place:
            drawing.elements.append(
                f"<text transform='translate(12 {TOP_PX + side / 2:.1f}) rotate(-90)' font-size='11' "
                f"text-anchor='middle' fill='{SOFT}'>positions</text>"
            )
        for rank in range(n):
            box = (x + rank * part, TOP_PX, part, side) if by_heads else (x, TOP_PX + rank * part, side, part)
            drawing.box(*box, fill=rank_colour(rank), tip=f"rank {rank}")
            if part >= 12:
                left, top, wide, high = box
                drawing.words(left + wide / 2, top + high / 2 + 4, str(rank), size=11, anchor="middle")
        below = f"full sequences of 1/{n} of the heads" if by_heads else f"1/{n} of the positions, all heads"
        drawing.words(x + side / 2, TOP_PX + side + 17, below, size=11, anchor="middle", colour=SOFT)
        if place < 2:
            middle = TOP_PX + side / 2
            drawing.words(x + side + gap / 2, middle - 9, "all-to-all", size=11.5, anchor="middle", bold=True)
            drawing.arrow(x + side + 12, middle, x + side + gap - 12, middle, colour=SOFT)
    for x in (20 + side, 20 + 2 * side + gap):
        share = f"{n - 1}/{n} of it leaves"
        drawing.words(x + gap / 2, TOP_PX + side / 2 + 18, share, size=11, anchor="middle", colour=SOFT)
    drawing.notes(
        0,
        TOP_PX + side + 50,
        [
            f"a rank sends (n-1)/n = {(n - 1) / n:.3g} of its queries, keys and values, and of its output; backward "
            "the same of their gradients",
            f"the heads, also those of keys and values, must divide by {n}; attention itself is any kernel's",
        ],
    )
    return drawing
