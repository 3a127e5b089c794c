"""Pipeline parallelism as a picture: which chunk of the layers each rank holds, and what crosses between them."""

from __future__ import annotations

from shoal.pictures.svg import Drawing, rank_colour
from shoal.strategy.terms.axes import pp

TOP_PX, CHUNK_PX, LANE_PX, GAP_PX = 40.0, 128.0, 34.0, 60.0


def pipeline_panel(term: pp) -> Drawing:
    """Ranks from left to right; chunks of a rank below each other."""
    drawing, n, chunks = Drawing(), term.n, term.chunks
    stages = n * chunks
    backwards = term.schedule == "zero-bubble" and chunks > 1  # a V: the second chunk runs from the last rank back
    for chunk in range(chunks):
        y = TOP_PX + chunk * (LANE_PX + 22)
        for place in range(n):
            rank = n - 1 - place if backwards and chunk % 2 else place
            stage = chunk * n + place
            x = rank * (CHUNK_PX + GAP_PX)
            drawing.box(x, y, CHUNK_PX, LANE_PX, fill=rank_colour(rank), tip=f"rank {rank}, stage {stage}")
            label = f"stage {stage} of {stages}"
            drawing.words(x + CHUNK_PX / 2, y + LANE_PX / 2 + 4, label, size=11.5, anchor="middle")
            if place < n - 1:
                left = x + CHUNK_PX + 4 if not (backwards and chunk % 2) else x - 4
                right = left + GAP_PX - 8 if not (backwards and chunk % 2) else left - GAP_PX + 8
                drawing.arrow(left, y + LANE_PX / 2, right, y + LANE_PX / 2)
    for rank in range(n):
        x = rank * (CHUNK_PX + GAP_PX) + CHUNK_PX / 2
        drawing.words(x, TOP_PX - 14, f"rank {rank}", size=13, anchor="middle", bold=True)
    drawing.notes(
        0,
        TOP_PX + chunks * (LANE_PX + 22) + 20,
        [
            f"a stage is 1/{stages} of the layers by cost; activations cross each border forward, their gradients back",
            f"{term.micro} micro-batches a step, schedule {term.schedule}: --timeline shows who computes when",
        ],
    )
    return drawing
