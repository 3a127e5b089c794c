"""A trace of a few steps, for chrome://tracing or Perfetto: what every operator took, on every thread."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.training.record.run import TRACE


class Tracing:
    """Traces a few steps with PyTorch's profiler: call `step()` after each; the last one writes the file."""

    def __init__(self, path: Path, *, first_step: int, steps: int) -> None:
        if first_step < 1 or steps < 1:
            raise ValueError(f"first_step is {first_step} and steps is {steps}, but both are counted from 1")
        self.path = path
        self._begin, self._end = first_step - 1, first_step - 1 + steps
        self._count = 0
        self._profile: Any = None
        self._turn()

    def _turn(self) -> None:
        from torch.profiler import profile

        if self._count == self._begin:
            # The profiler's library otherwise writes its own progress into the terminal.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            self._profile = profile(acc_events=True)
            self._profile.start()
        elif self._count == self._end:
            self.close()

    def step(self) -> None:
        """A step is done."""
        self._count += 1
        self._turn()

    def close(self) -> None:
        """Writes what was traced so far, if it was not yet written."""
        if self._profile is not None:
            done, self._profile = self._profile, None
            done.stop()
            fresh = self.path.with_name("new-" + self.path.name)
            done.export_chrome_trace(str(fresh))
            os.replace(fresh, self.path)

    def __enter__(self) -> Tracing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tracing(folder: Path, first_step: int = 2, steps: int = 3) -> Tracing:
    """Traces `steps` steps into the folder's trace.json, from the `first_step`-th on; the first warms up."""
    return Tracing(Path(folder) / TRACE, first_step=first_step, steps=steps)
