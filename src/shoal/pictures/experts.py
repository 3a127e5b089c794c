"""Expert parallelism as a picture: each rank's tokens, the experts they travel to, and the way back."""

from __future__ import annotations

from shoal.pictures.svg import SOFT, Drawing, rank_colour
from shoal.strategy.terms.axes import ep

TOP_PX, LANE_PX, GAP_PX = 40.0, 34.0, 12.0
TOKENS_PX, EXPERTS_PX, CROSSING_PX = 132.0, 190.0, 150.0


def experts_panel(term: ep) -> Drawing:
    drawing, n = Drawing(), term.n
    places = [0.0, TOKENS_PX + CROSSING_PX, TOKENS_PX + EXPERTS_PX + 2 * CROSSING_PX]
    wides = [TOKENS_PX, EXPERTS_PX, TOKENS_PX]
    lanes = [TOP_PX + rank * (LANE_PX + GAP_PX) for rank in range(n)]
    for x, wide, title in zip(places, wides, ("tokens", "experts of a layer", "answers, weighted"), strict=True):
        drawing.words(x + wide / 2, TOP_PX - 24, title, size=13, anchor="middle", bold=True)
    for start in (TOKENS_PX, TOKENS_PX + CROSSING_PX + EXPERTS_PX):
        drawing.words(start + CROSSING_PX / 2, TOP_PX - 10, "all-to-all", size=11.5, anchor="middle", bold=True)
        for source, from_y in enumerate(lanes):
            for to_y in lanes:
                drawing.arrow(
                    start + 4,
                    from_y + LANE_PX / 2,
                    start + CROSSING_PX - 4,
                    to_y + LANE_PX / 2,
                    colour=rank_colour(source),
                    wide=1.8 if n <= 8 else 1.0,
                )
    for rank, y in enumerate(lanes):
        for x, wide, text in zip(places, wides, (f"rank {rank}", _held(rank, n), f"rank {rank}"), strict=True):
            drawing.box(x, y, wide, LANE_PX, fill=rank_colour(rank), tip=f"rank {rank}")
            drawing.words(x + wide / 2, y + LANE_PX / 2 + 4, text, size=11.5, anchor="middle")
    moved = (n - 1) / n
    drawing.notes(
        0,
        lanes[-1] + LANE_PX + 30,
        [
            f"E experts in every layer, E/{n} on each rank; the router is on every rank, for its own tokens",
            f"with even routing (n-1)/n = {moved:.3g} of a rank's rows leave it, and as many answers; backward too",
            f"attention, norms, router and embeddings: {n} replicas, each with 1/{n} of the batch",
        ],
    )
    drawing.words(places[1] + EXPERTS_PX / 2, TOP_PX - 8, f"E/{n} on each rank", size=11, anchor="middle", colour=SOFT)
    return drawing


def _held(rank: int, n: int) -> str:
    """The numbers of the experts of a rank, of E."""

    def times(factor: int) -> str:
        return "0" if not factor else f"E/{n}" if factor == 1 else "E" if factor == n else f"{factor}E/{n}"

    return f"experts {times(rank)} to {times(rank + 1)} - 1"
