"""Which pictures are refused."""

from __future__ import annotations

MOST_BOXES = 20_000
"""Passes in one timeline. More of them make a picture of several megabytes in which nothing can be seen."""


class CannotDraw(ValueError):
    """A picture that does not exist, is too large to be seen, or cannot be written."""


def require_drawable(what: str, passes: int) -> None:
    """Refuses a timeline in which nothing could be seen."""
    if passes > MOST_BOXES:
        raise CannotDraw(
            f"{what}: a timeline of {passes:,} passes is too large to be seen, at most {MOST_BOXES:,} are drawn; "
            "the pattern is the same with fewer micro-batches or ranks"
        )
