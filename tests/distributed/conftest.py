"""Real ranks for tests: `ranks(targets.function, arguments, ranks=2)` gives the results.

Targets live in importable modules (pytest's `pythonpath` holds `tests`), never in closures.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import pytest

from shoal.launch import run_ranks, warm_up
from shoal.launch.start import Target, name_of
from shoal.proof import entry as proof
from shoal.training import entry as training

TIMEOUT_S = 60.0
HUGGING_FACE = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")
"""More than a second for each rank that trains a model of theirs; where they are not installed, nothing is loaded."""


def load(module: str, environment: Mapping[str, str] | None = None) -> None:
    """Lets the server load what its ranks need: each of them would do so in every test otherwise."""
    modules = (*training.MODULES, *proof.MODULES, *HUGGING_FACE, *([module] if module else []))
    warm_up(*modules, environment=environment)


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
        name = target if isinstance(target, str) else name_of(target)
        load(name.partition(":")[0], options.get("environment"))
        try:
            return run_ranks(target, arguments or {}, **options)
        finally:
            signal.setitimer(signal.ITIMER_REAL, left_s)
            signal.signal(signal.SIGALRM, before)

    return run
