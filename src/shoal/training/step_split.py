"""Where the steps of one rank go: waiting for communication, reading data, forward, the rest. Read from stopwatches
that run anyway; nothing is sent before the run's end, when the medians of all ranks are collected."""

from __future__ import annotations

import statistics
import time
from typing import Any

from shoal.comm.json_exchange import exchange
from shoal.comm.waited import WAITED
from shoal.runtime.step import StepRunner

WARMUP_STEPS = 3
KEPT = 4096
"""The newest steps whose figures are kept."""


class StepSplit:
    """One rank's figures."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self.rows: list[tuple[float, float, float, float, float]] = []
        self.steps = 0

    def begin(self) -> None:
        self._before = self._now()

    def end(self) -> None:
        self.steps += 1
        if self.steps > WARMUP_STEPS or not self.rows:
            wall, waited, data, forward, cpu = (now - was for now, was in zip(self._now(), self._before, strict=True))
            if self.steps == WARMUP_STEPS + 1:
                self.rows.clear()
            self.rows.append((wall, waited, data, forward, cpu))
            if len(self.rows) > KEPT:
                del self.rows[: KEPT // 2]

    def _now(self) -> tuple[float, float, float, float, float]:
        spent = self.runner.spent
        return time.perf_counter(), WAITED.seconds, spent["data"], spent["forward"], time.thread_time()

    def of_all(self, among: Any) -> list[dict[str, Any]]:
        """Medians of every rank, in the order of ranks. All ranks call it alike."""
        names = ("wall_s", "wait_s", "data_s", "forward_s", "cpu_s")
        mine: dict[str, Any] = {}
        if self.rows:
            columns = zip(*self.rows, strict=True)
            mine = {name: statistics.median(column) for name, column in zip(names, columns, strict=True)}
        return [dict(row["split"]) for row in exchange({"split": mine}, among)]
