"""A few dense steps of a job, and its links, as `estimate/crossover.py` wants them: when each bucket is ready, what a
message costs at its ends, and how much of a core it takes to move bytes while the job computes.

On every rank of a running job. Ranks do the same in the same order; each has its own figures, and the slower rank's
count (`slower`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shoal.calibration.codecs import nearest_pair
from shoal.calibration.fit import Timed, fit_link
from shoal.calibration.machine import lower_quartile
from shoal.calibration.measure import ALGORITHMS
from shoal.estimate.crossover import Computing, Ends, ReducedBucket, Setting
from shoal.parallel.engine import Engine

LINK_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
BACKGROUND_RATES = (6.25e7, 1.25e8, 2.5e8, 5e8)
"""Bytes a second: half a gigabit to four."""
BACKGROUND_S = 0.03
POLL_S = 5e-3
"""Long enough for the looking to cost nothing beside the moving."""
ROUNDS = 9
WARM_UP = 2
AS_FAST_AS_IT_GOES = 1e15
"""Bytes a second of a wire that is not felt."""


def measure_ends(group: Any, *, framed: float, rounds: int = ROUNDS) -> Ends:
    """What messages over a group of one rank a host cost by themselves; its wire is to be as fast as it goes."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for turn in range(rounds + 1):
        for nbytes in LINK_BYTES:
            values = torch.zeros(nbytes // 4)
            for algorithm in ALGORITHMS:
                group.prefer(algorithm)
                dist.barrier(group=group)
                start_s = time.perf_counter()
                dist.all_reduce(values, group=group)
                if turn:
                    seconds.setdefault((algorithm, nbytes), []).append(time.perf_counter() - start_s)
    group.prefer("auto")
    timed = [Timed(*which, slower(lower_quartile(each), group)) for which, each in seconds.items()]
    return Ends(times=fit_link(timed, ranks=dist.get_world_size(group)).link, framed=framed)


def with_background(ends: Ends, group: Any, turn_to: Callable[[float], Any], *, rounds: int = ROUNDS) -> Ends:
    """The same with the core's time that it takes to move bytes while nobody waits for them. `turn_to` sets the wire's
    bytes a second: a slow one is slept on and woken up for more often for each byte.
    """
    seconds: dict[float, list[float]] = {}
    for _ in range(rounds):
        for rate in BACKGROUND_RATES:
            # As long on every wire.
            values = torch.zeros(int(BACKGROUND_S * rate / ends.framed) // 4)
            turn_to(rate)
            dist.barrier(group=group)
            before_s = time.process_time()
            work: Any = dist.all_reduce(values, group=group, async_op=True)
            while not work.is_completed():
                time.sleep(POLL_S)
            work.wait()
            seconds.setdefault(rate, []).append((time.process_time() - before_s) / values.nbytes)
    byte_s = np.array([slower(lower_quartile(seconds[rate]), group) for rate in BACKGROUND_RATES])
    # Seconds a byte = share x the wire's seconds a byte + what a byte costs on any wire.
    rows = np.array([[ends.framed / rate, 1.0] for rate in BACKGROUND_RATES])
    share, each_s = nearest_pair(rows, byte_s)
    return replace(ends, background_share=share, background_byte_s=each_s)


def measure_computing(
    step: Callable[[int], Any], engine: Engine, ends: Ends, group: Any, *, steps: int = 2 * ROUNDS
) -> Computing:
    """Dense steps over a link that is as fast as it goes: `step(number)` is one of them, by `engine`."""
    buckets = engine.buckets
    marks: dict[int, float] = {}
    rows: list[list[float]] = []
    for bucket in buckets:
        engine.reduction.on_done[id(bucket)] = partial(_mark, marks, id(bucket))
    for number in range(WARM_UP + steps):
        dist.barrier(group=group)
        start_s = time.perf_counter()
        step(number)
        end_s = time.perf_counter()
        if number >= WARM_UP:
            rows.append([*(marks[id(bucket)] - start_s for bucket in buckets), end_s - start_s])
    for bucket in buckets:
        del engine.reduction.on_done[id(bucket)]
    *ready_s, step_s = (slower(lower_quartile(list(column)), group) for column in zip(*rows, strict=True))
    found = Computing(
        step_s=step_s,
        buckets=tuple(
            ReducedBucket(shapes=tuple(tuple(slot.shape) for slot in bucket.buffer.slots), ready_s=at_s)
            for bucket, at_s in zip(buckets, ready_s, strict=True)
        ),
    )
    setting = Setting(computing=found, ends=ends, ranks=dist.get_world_size(group))
    return replace(found, step_s=step_s - setting.shown_s(AS_FAST_AS_IT_GOES))


def _mark(marks: dict[int, float], which: int) -> None:
    marks[which] = time.perf_counter()


def slower(seconds: float, group: Any) -> float:
    """The same on all ranks of a group: the slowest one's."""
    of_all = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=group)
    return float(of_all)
