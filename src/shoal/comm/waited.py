"""How long the main thread of this process has waited for communication: for the wire and for ranks that are late."""

from __future__ import annotations

import threading
import time
from types import TracebackType


class Waited:
    """A stopwatch around what blocks. Waits inside of waits, and those of other threads, are not counted."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._main = threading.main_thread().ident
        self._depth = 0
        self._started = 0.0

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self._depth += 1
            if self._depth == 1:
                self._started = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.get_ident() == self._main:
            self._depth -= 1
            if self._depth == 0:
                self.seconds += time.perf_counter() - self._started


WAITED = Waited()
