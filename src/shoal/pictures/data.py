"""Data parallelism as a picture: each replica's part of the batch, and what it keeps of parameters, gradients and
optimiser state, in bytes a parameter; what a stage of ZeRO leaves to other ranks is drawn empty.
"""

from __future__ import annotations

from shoal.pictures.svg import FAINT, INK, SOFT, Drawing, rank_colour
from shoal.strategy.terms.axes import dp
from shoal.strategy.terms.compress import none
from shoal.strategy.terms.sync import bsp
from shoal.strategy.terms.via import allreduce

STATE_BYTES = {"parameters": 4.0, "gradients": 4.0, "optimiser state": 8.0}
"""Bytes a parameter: float32 and an optimiser with two moments, such as AdamW."""
SPLIT_FROM = {"parameters": 3, "gradients": 2, "optimiser state": 1}
"""The stage of ZeRO from which each is split."""
TOP_PX, LANE_PX, GAP_PX = 40.0, 26.0, 10.0
BATCH_PX, BYTE_PX, LEFT_PX = 150.0, 24.0, 62.0


def held_bytes(term: dp) -> dict[str, float]:
    """What a rank keeps of each, in bytes a parameter."""
    return {what: size / (term.n if term.zero >= SPLIT_FROM[what] else 1) for what, size in STATE_BYTES.items()}


def data_panel(term: dp) -> Drawing:
    drawing, n = Drawing(), term.n
    state_px = LEFT_PX + BATCH_PX + 44
    drawing.words(LEFT_PX + BATCH_PX / 2, TOP_PX - 24, "batch", size=13, anchor="middle", bold=True)
    # Where models differ, or a server has the state, replicas do not simply hold the same.
    states = STATE_BYTES if _all_reduced(term) else {}
    x = state_px
    for what, size in states.items():
        drawing.words(x + size * BYTE_PX / 2, TOP_PX - 24, what, size=13, anchor="middle", bold=True)
        x += size * BYTE_PX + 8
    total = sum(held_bytes(term).values())
    for rank in range(n):
        y = TOP_PX + rank * (LANE_PX + GAP_PX)
        drawing.words(LEFT_PX - 10, y + 17, f"rank {rank}", size=12, anchor="end")
        drawing.box(LEFT_PX, y, BATCH_PX, LANE_PX, fill="none", line=FAINT, dashed=True)
        drawing.box(
            LEFT_PX + rank * BATCH_PX / n,
            y,
            BATCH_PX / n,
            LANE_PX,
            fill=rank_colour(rank),
            tip=f"samples of rank {rank}",
        )
        x = state_px
        for what, size in states.items():
            wide, parts = size * BYTE_PX, n if term.zero >= SPLIT_FROM[what] else 1
            drawing.box(x, y, wide, LANE_PX, fill="none", line=FAINT, dashed=True)
            offset = rank * wide / n if parts > 1 else 0.0
            drawing.box(x + offset, y, wide / parts, LANE_PX, fill=rank_colour(rank), tip=f"{what} of rank {rank}")
            x += wide + 8
        if states:
            drawing.words(x + 6, y + 17, f"{total:.3g} bytes a parameter", size=12, colour=INK if term.zero else SOFT)
    drawing.notes(0, TOP_PX + n * (LANE_PX + GAP_PX) + 24, _captions(term))
    return drawing


def _all_reduced(term: dp) -> bool:
    return isinstance(term.sync, bsp) and isinstance(term.via, allreduce) and isinstance(term.compress, none)


def _captions(term: dp) -> list[str]:
    if not _all_reduced(term):
        return term.words().split("; ")
    once = (term.n - 1) / term.n
    moved = {
        0: "each step: gradients are all-reduced, bucket by bucket while backward runs",
        1: "each step: gradients are reduce-scattered, each rank updates its slice, parameters are all-gathered",
        2: "each step: gradients are reduce-scattered as they appear, each rank updates its slice, parameters are "
        "all-gathered",
        3: "each step: parameters are all-gathered block by block before use, forward and backward; gradients are "
        "reduce-scattered",
    }[term.zero]
    sent = f"up to 3g(n-1)/n = {3 * once:.3g} g" if term.zero == 3 else f"2g(n-1)/n = {2 * once:.3g} g"
    return [
        f"float32 and AdamW: {' + '.join(f'{size:.3g}' for size in held_bytes(term).values())} bytes a parameter",
        moved,
        f"a rank sends {sent}, where g is the bytes of all gradients",
    ]
