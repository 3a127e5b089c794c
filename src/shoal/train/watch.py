"""A hang is named: which rank is late, in which collective, since when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Watch:
    def __init__(self, place: Any, *, hang_after_s: float, report: Callable[[dict[str, Any]], None]) -> None:
        self.report = report

    def __enter__(self) -> Watch:
        return self

    def done(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass
