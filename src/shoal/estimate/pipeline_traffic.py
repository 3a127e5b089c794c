"""What a pipeline sends, in closed form.

For every micro-batch and every border between stages that lie on different ranks: each tensor that crosses the border
goes forward once, and a gradient of the same size comes back for each that learns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shoal.estimate.traffic import Call

Crossing = tuple[int, bool]
"""(bytes for one micro-batch, whether a gradient comes back)"""


def pipeline_traffic(
    *,
    axis: str,
    ranks: int,
    before: Mapping[int, Sequence[Sequence[Crossing]]],
    behind: Mapping[int, Sequence[Sequence[Crossing]]],
    numbers_bytes: int = 0,
) -> Iterator[Call]:
    """`before` and `behind`: for each stage of this rank and each micro-batch what crosses the border before (behind)
    the stage, where the other side is another rank. `numbers_bytes`: what goes back about each micro-batch in addition
    to its gradient (PipeDream)."""
    for sides, there, back in ((before, "recv", "send"), (behind, "send", "recv")):
        for micros in sides.values():
            for crossings in micros:
                for size, learns in crossings:
                    yield axis, "forward", there, size, ranks
                    if learns:
                        yield axis, "backward", back, size, ranks
                if numbers_bytes:
                    yield axis, "backward", back, numbers_bytes, ranks
