"""What the protocol sees of a contestant without asking it: which samples it reads, which losses it computes, which
optimisers step, when something is compiled, what it holds in memory.

A job is wrapped before a contestant gets it. The state lies in the module, so that rehearsals of the job's code, which
restore what the job holds, leave it alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import optimizer as torch_optimizer

from shoal.job import Batch, Job

KEPT_STEPS = 3
"""Steps of which the sample ids themselves are kept, for messages."""
NOT_COMPARED = ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable", "maximize")
"""Options of an optimiser that change no number, or are compared as the schedule."""


class RunWatch:
    """What was seen on this rank."""

    def __init__(self) -> None:
        self.now = -1
        self.counts: dict[int, int] = {}
        self.sums: dict[int, int] = {}
        self.ids: dict[int, list[int]] = {}
        self.data_s: dict[int, float] = {}
        self.losses: dict[int, list[tuple[Tensor, Any]]] = {}
        self.started: dict[int, tuple[float, float]] = {}
        self.compiled: dict[int, int] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.peak_bytes: int | None = None
        self.base_bytes, self.held_bytes = 0, 0
        self.phases: dict[int, dict[str, list[float]]] = {}
        self._phase, self._mark = "rest", (0.0, 0.0)

    def enter(self, phase: str) -> None:
        """A part of the step begins, and the one before it ends: seconds, and seconds on a core, are added to that."""
        now = time.perf_counter(), time.thread_time()
        if self.now >= 0:
            spent = self.phases.setdefault(self.now, {}).setdefault(self._phase, [0.0, 0.0])
            spent[0] += now[0] - self._mark[0]
            spent[1] += now[1] - self._mark[1]
        self._phase, self._mark = phase, now

    def begin(self, step: int) -> None:
        """A step starts. The first forgets what trial runs before it did."""
        if step == self.now:
            return
        self.enter("rest")
        if step == 0 or step < self.now:
            for each in (
                self.counts,
                self.sums,
                self.ids,
                self.data_s,
                self.losses,
                self.started,
                self.compiled,
                self.phases,
            ):
                for late in [number for number in each if number >= step]:
                    del each[late]
            if step == 0:
                self.optimizers.clear()
                self.peak_bytes = None
        self.now = step
        self.compiled[step] = _graphs()
        self.started[step] = time.perf_counter(), time.thread_time()

    def read(self, indices: np.ndarray, seconds: float) -> None:
        step, numbers = self.now, np.asarray(indices, dtype=np.uint64)
        self.counts[step] = self.counts.get(step, 0) + len(numbers)
        self.sums[step] = (self.sums.get(step, 0) + mixed(numbers)) % (1 << 64)
        self.data_s[step] = self.data_s.get(step, 0.0) + seconds
        if step < KEPT_STEPS:
            self.ids.setdefault(step, []).extend(int(each) for each in numbers)

    def note_peak(self) -> None:
        """The memory of training, before the first evaluation adds its own; that of live tensors too."""
        if self.peak_bytes is None:
            self.peak_bytes = memory()["VmHWM"]
            self.held_bytes = held_bytes()

    def facts(self) -> dict[str, Any]:
        """All of it, as JSON."""
        self.note_peak()
        steps = sorted(self.started)
        marks = [self.started[step] for step in steps]
        return {
            "samples": [[self.counts.get(step, 0), str(self.sums.get(step, 0))] for step in steps],
            "first_samples": [self.ids.get(step, []) for step in steps[:KEPT_STEPS]],
            "data_s": [self.data_s.get(step, 0.0) for step in steps],
            "cpu_s": [then[1] - now[1] for now, then in pairwise(marks)],
            "wall_s": [then[0] - now[0] for now, then in pairwise(marks)],
            "phases": [self.phases.get(step, {}) for step in steps[:-1]],
            "compiled": [self.compiled[step] for step in steps],
            "optimizers": [_described(each) for each in self.optimizers.values()],
            "peak_bytes": (self.peak_bytes or 0) - self.base_bytes,
            "held_bytes": self.held_bytes,
        }


def mixed(numbers: np.ndarray) -> int:
    """A sum that tells sets of sample ids apart, whatever their order and however ranks share them (splitmix64)."""
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))


WATCH = RunWatch()


class _Read:
    """Data that notes what is read of it."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getattr__(self, name: str) -> Any:
        if name == "_data":
            raise AttributeError(name)
        return getattr(self._data, name)

    def batch(self, indices: np.ndarray) -> Batch:
        WATCH.enter("data")
        start = time.perf_counter()
        found: Batch = self._data.batch(indices)
        WATCH.read(indices, time.perf_counter() - start)
        WATCH.enter("forward")
        return found


class _Validated(_Read):
    def batch(self, indices: np.ndarray) -> Batch:
        WATCH.note_peak()
        found: Batch = self._data.batch(indices)
        return found


class _Scheduled:
    """The schedule, which is asked at the beginning of every step."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def __call__(self, step: int) -> float:
        WATCH.begin(step)
        return float(self.schedule(step))


class _Lost:
    """The loss: with it the forward ends. Kept as a tensor if asked to; reading its value would make the rank wait."""

    def __init__(self, loss: Any, *, keep: bool) -> None:
        self.loss, self.keep = loss, keep

    def __call__(self, output: Any, batch: Batch) -> Any:
        found = self.loss(output, batch)
        WATCH.enter("backward")
        if self.keep and isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor):
            count = found[1].detach() if isinstance(found[1], Tensor) else found[1]
            WATCH.losses.setdefault(WATCH.now, []).append((found[0].detach(), count))
        return found


def watched(job: Job, *, losses: bool) -> Job:
    """The job as a contestant gets it. `losses`: whether losses are kept too; Shoal's own record has them."""
    changes: dict[str, Any] = {"train": _Read(job.train), "schedule": _Scheduled(job.schedule)}
    if job.validation is not None:
        changes["validation"] = _Validated(job.validation)
    changes["loss"] = _Lost(job.loss, keep=losses)
    return replace(job, **changes)


def start_watching() -> RunWatch:
    """A fresh watch for this process, with the memory that is held before a contestant is built."""
    global WATCH
    WATCH = RunWatch()
    torch_optimizer.register_optimizer_step_pre_hook(_steps)
    torch_optimizer.register_optimizer_step_post_hook(_stepped)
    give_back()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # The peak so far is forgotten.
    WATCH.base_bytes = memory()["VmRSS"]
    return WATCH


def give_back() -> None:
    """What was freed goes back to the system, so that nobody's memory hides in it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # Of glibc alone.
        ctypes.CDLL(None).malloc_trim(0)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not isinstance(optimizer, ZeroRedundancyOptimizer):  # It has another, which updates its part.
        WATCH.optimizers.setdefault(id(optimizer), optimizer)
    WATCH.enter("rest")


def _steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    WATCH.enter("update")


def held_bytes() -> int:
    """Bytes of all storages that live tensors of this process hold, each once: what is allocated between steps."""
    gc.collect()
    held = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and not thing.is_meta and thing.device.type == "cpu":
            with contextlib.suppress(RuntimeError, NotImplementedError):
                storage = thing.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def _graphs() -> int:
    """How many graphs `torch.compile` has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


def memory() -> dict[str, int]:
    """Resident bytes of this process now, and the most so far."""
    with open("/proc/self/status", encoding="ascii") as file:
        rows = (line.split() for line in file)
        return {row[0][:-1]: 1024 * int(row[1]) for row in rows if row[0] in ("VmRSS:", "VmHWM:")}


def _described(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimiser that has stepped: its class, its options, the precision of parameters and state."""
    options, parameters, state = [], set(), set()
    # Groups without elements are placeholders, unless all are: ZeRO-3 of DeepSpeed takes the values away between steps.
    filled = [group for group in optimizer.param_groups if any(each.numel() for each in group["params"])]
    for group in filled or optimizer.param_groups:
        found = {name: _plain(value) for name, value in group.items() if name not in NOT_COMPARED}
        if found not in options:
            options.append(found)
        parameters |= {str(each.dtype).removeprefix("torch.") for each in group["params"] if each.numel()}
    for entries in optimizer.state.values():
        for value in entries.values() if isinstance(entries, dict) else ():
            if isinstance(value, Tensor) and value.numel() > 1:
                state.add(str(value.dtype).removeprefix("torch."))
    return {
        "class": type(optimizer).__name__,
        "options": sorted(options, key=str),
        "parameters": sorted(parameters),
        "state": sorted(state),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else str(tuple(value.shape))
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def hashed(parameters: Iterator[tuple[str, Tensor]]) -> dict[str, list[str]]:
    """Parameter -> its shape and precision, and the hash of its bits."""
    found = {}
    for name, value in parameters:
        plain = value.detach().to("cpu").contiguous()
        bits = hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        found[name] = [f"{str(plain.dtype).removeprefix('torch.')}{list(plain.shape)}", bits]
    return found
