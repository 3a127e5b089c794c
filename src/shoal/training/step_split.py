"""Where the steps of one rank go: waiting for communication, reading data, forward, the rest. Read from stopwatches
that run anyway; nothing is sent before the run's end, when the medians of all ranks are collected. Where a rank has an
accelerator, its events measure the time between the first and the last kernel of a step."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from shoal.comm.json_exchange import exchange
from shoal.comm.waited import WAITED
from shoal.launch.devices import peak_memory_bytes
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
        self.device = runner.engine.device
        self.on_device = None if self.device.type == "cpu" else DeviceTimes(self.device)

    def begin(self) -> None:
        self._before = self._now()
        if self.on_device is not None:
            self.on_device.begin()

    def end(self) -> None:
        self.steps += 1
        if self.on_device is not None:
            self.on_device.end()
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
            mine["memory_bytes"] = peak_memory_bytes(self.device)
            if self.on_device is not None:
                mine["device_s"] = self.on_device.median_s()
        return [dict(row["split"]) for row in exchange({"split": mine}, among)]


class DeviceTimes:
    """Seconds of the device for each step, from its first kernel to its last. The host does not wait for them: a step's
    time is read at the end of the next one."""

    def __init__(self, device: torch.device) -> None:
        self.kind = device.type
        self.seconds: list[float] = []
        self._ended: tuple[torch.Event, torch.Event] | None = None

    def begin(self) -> None:
        self._begun = self._mark()

    def end(self) -> None:
        self._read()
        self._ended = (self._begun, self._mark())

    def median_s(self) -> float:
        """Without the first steps, where there are others."""
        self._read()
        return statistics.median(self.seconds[WARMUP_STEPS:] or self.seconds)

    def _mark(self) -> torch.Event:
        event = torch.Event(self.kind, enable_timing=True)
        event.record()
        return event

    def _read(self) -> None:
        if self._ended is not None:
            begun, ended = self._ended
            ended.synchronize()
            self.seconds.append(begun.elapsed_time(ended) / 1e3)
            del self.seconds[: max(0, len(self.seconds) - KEPT)]
            self._ended = None
