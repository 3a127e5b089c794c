"""Named points of a run at which a test can delay or kill a rank.

Ranks read what other ranks write. Between two synchronisations any rank may be late, and the result must not depend on
which. `reach` marks every such place; it does nothing unless a test has installed a hook in this process.
"""

from __future__ import annotations

from collections.abc import Callable

POINTS = (
    "start: same values",
    "start: shared block mapped",
    "start: room for parameters",
    "start: parameters laid out",
    "start: engine ready",
    "restore: begun",
    "restore: buffers read",
    "restore: parameters read",
    "restore: parameters published",
    "restore: optimizer read",
    "step: forward",
    "step: gradient added",
    "step: parameters gathered",
    "step: backward done",
    "step: sums received",
    "step: gradients reduced",
    "step: norm known",
    "step: updated",
    "step: published",
    "stage: forward",
    "stage: backward",
    "evaluate: measured",
    "save: contents listed",
    "save: written",
    "save: manifest written",
    "save: old one renamed",
    "save: in place",
    "save: done",
    "close: begun",
)
"""Every point, in the order of a run. A strategy reaches a subset of them."""

_hook: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Reports that this rank has reached a point."""
    if _hook is not None:
        _hook(point)


def on_reach(hook: Callable[[str], None] | None) -> None:
    """Calls `hook(point)` at every point of this process from now on; None removes the hook."""
    global _hook
    _hook = hook
