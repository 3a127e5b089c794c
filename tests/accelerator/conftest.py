"""Ranks on the rehearsal device: `on_device(target, arguments, ranks=2)` runs a function there.

The device is built once; where it cannot be, every test of this folder is skipped and says why. It is on the path of
the ranks only: the process that runs the tests keeps a PyTorch without an accelerator.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from accelerator.build import CannotBuild, variables
from shoal.launch import run_ranks


@pytest.fixture(scope="session")
def device_variables() -> dict[str, str]:
    try:
        return variables()
    except CannotBuild as error:
        pytest.skip(f"no rehearsal device: {error}")


@pytest.fixture
def device(device_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and commands that are started from here on have the device."""
    for name, value in device_variables.items():
        monkeypatch.setenv(name, value)
    # A fork server loads what the path of its parent has.
    for path in reversed(device_variables["PYTHONPATH"].split(":")):
        monkeypatch.syspath_prepend(path)
    assert "torch.reef" not in sys.modules


@pytest.fixture
def on_device(device: None) -> Callable[..., list[Any]]:
    """`run_ranks` on the device that gives up after `timeout_s`."""

    def run(target: Any, arguments: dict[str, Any] | None = None, *, timeout_s: float = 110.0, **options: Any) -> Any:
        def give_up(number: int, frame: FrameType | None) -> None:
            raise TimeoutError(f"{target} was not done after {timeout_s:g} s")

        before, left_s = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            return run_ranks(target, arguments or {}, **options)
        finally:
            signal.setitimer(signal.ITIMER_REAL, left_s)
            signal.signal(signal.SIGALRM, before)

    return run
