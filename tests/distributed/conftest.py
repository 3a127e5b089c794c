"""Real ranks for tests: `ranks(targets.function, arguments, ranks=2)` gives the results.

Targets live in importable modules (pytest's `pythonpath` holds `tests`), never in closures.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from shoal.launch import run_ranks
from shoal.launch.start import Target

TIMEOUT_S = 60.0


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """`run_ranks` that gives up after TIMEOUT_S (or `timeout_s=`): a deadlock fails its own test only."""

    def run(
        target: Target | str, arguments: dict[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S, **options: Any
    ) -> Any:
        def give_up(number: int, frame: FrameType | None) -> None:
            raise TimeoutError(f"{target} was not done after {timeout_s:g} s")

        # An alarm of our own, which run_ranks cleans up after; nested under pytest-timeout's by restoring it.
        before, left_s = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            return run_ranks(target, arguments or {}, **options)
        finally:
            signal.setitimer(signal.ITIMER_REAL, left_s)
            signal.signal(signal.SIGALRM, before)

    return run
