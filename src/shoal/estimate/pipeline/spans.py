"""How long many pipelines take at once: the play without its pictures, for whole columns of costs.

The order of passes does not depend on what they take, so each schedule is laid out once, in waves: a pass comes at
least one wave after the two it waits for (the one before it on its rank, and the one whose message it needs). All
pipelines, of whatever schedules, then walk through their waves together. A message keeps both ends busy, as in
`simulate/play.py`, which a test holds against this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoal.strategy.schedule import actions, stage_rank
from shoal.strategy.terms import pp

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipelines:
    """Pipelines of one schedule: stages x pipelines of seconds."""

    schedule: str
    ranks: int
    chunks: int
    micro: int
    forward_s: Numbers
    backward_s: Numbers
    """All of it; a split backward takes `weight_s` of it later."""
    weight_s: Numbers
    message_s: Numbers
    """For each pipeline."""

    @property
    def passes(self) -> int:
        """Events of one of them."""
        return passes_of(self.schedule, ranks=self.ranks, chunks=self.chunks, micro=self.micro)


def passes_of(schedule: str, *, ranks: int, chunks: int, micro: int) -> int:
    """How many passes a step has."""
    return (3 if schedule == "zero-bubble" else 2) * ranks * chunks * micro


@dataclass(frozen=True, kw_only=True, slots=True)
class Laid:
    """A schedule in waves; passes are numbered wave by wave, and what comes from nowhere from pass -1."""

    starts: Places
    """The first pass of each wave, and after the last wave the number of passes."""
    cost: Places
    """Which of the costs a pass takes: its stage in the rows of forwards, backwards, then weight gradients."""
    before: Places
    """The pass before it on its rank."""
    cause: Places
    """The pass on another rank that it waits for."""
    received: Numbers
    """1 if a message comes in before it."""
    sent: Numbers
    """1 if a message goes out before it: that of the pass before it."""
    ends: Places
    """The last pass of each rank; nothing is sent after the last of them to end."""


@lru_cache(maxsize=1024)
def laid(schedule: str, ranks: int, chunks: int, micro: int) -> Laid:
    """The waves of a schedule."""
    lanes = actions(pp(ranks, schedule, micro=micro, chunks=chunks))
    stages = ranks * chunks
    home = [stage_rank(stage, ranks, chunks, schedule) for stage in range(stages)]
    rows = {"F": 0, "BW": stages, "B": stages, "W": 2 * stages}
    # A result is named by its kind, stage and micro-batch in one number; -1: nobody else's is needed.
    wave_of: dict[int, int] = {}
    pass_of: dict[int, int] = {}
    asleep: dict[int, list[int]] = {}
    at, wave, last = [0] * ranks, [-1] * ranks, [-1] * ranks
    sends = [0.0] * ranks
    wave_at: list[int] = []
    told: list[tuple[int, int, int, float, float]] = []
    awake = list(range(ranks))
    while awake:
        rank = awake.pop()
        lane = lanes[rank]
        while at[rank] < len(lane):
            action = lane[at[rank]]
            kind, stage, number = action.kind[0], action.stage, action.micro
            needed, onward = -1, -1
            if kind == "F":
                if stage and home[stage - 1] != rank:
                    needed = (stage - 1) * micro + number
                if stage < stages - 1:
                    onward = stage + 1
            elif kind == "B":
                if stage < stages - 1 and home[stage + 1] != rank:
                    needed = (stages + stage + 1) * micro + number
                onward = stage - 1
            if needed >= 0 and needed not in wave_of:
                asleep.setdefault(needed, []).append(rank)
                break
            wave[rank] = max(wave[rank], wave_of.get(needed, -1)) + 1
            wave_at.append(wave[rank])
            told.append((
                rows[action.kind] + stage, last[rank], pass_of.get(needed, -1), float(needed >= 0), sends[rank]
            ))  # fmt: skip
            last[rank] = len(told) - 1
            sends[rank] = float(onward >= 0 and home[onward] != rank)
            at[rank] += 1
            if kind != "W":
                result = ((0 if kind == "F" else stages) + stage) * micro + number
                wave_of[result], pass_of[result] = wave[rank], last[rank]
                awake += asleep.pop(result, [])
    if len(told) != sum(len(lane) for lane in lanes):
        raise ValueError(f"{schedule} on {ranks} ranks does not come to an end")
    waves = np.array(wave_at)
    order = np.argsort(waves, kind="stable")
    renamed = np.empty(len(told) + 1, dtype=np.int64)
    renamed[order], renamed[-1] = np.arange(len(told)), -1
    columns = np.array(told)[order].T
    cost, before, cause = columns[:3].astype(np.int64)
    starts = np.searchsorted(waves[order], np.arange(waves.max() + 2))
    return Laid(
        starts=starts, cost=cost, before=renamed[before], cause=renamed[cause], received=columns[3], sent=columns[4],
        ends=renamed[np.array(last)],
    )  # fmt: skip


def spans_s(several: Sequence[Pipelines]) -> list[Numbers]:
    """From the first pass to the end of the last, for each pipeline of each."""
    if not several:
        return []
    layouts = [laid(each.schedule, each.ranks, each.chunks, each.micro) for each in several]
    counts = [len(each.message_s) for each in several]
    waves = max(len(each.starts) for each in layouts) - 1
    # Where each wave of each schedule lies: waves one after the other, in each the schedules, in those the passes.
    widths = np.zeros((waves, len(several)), dtype=np.int64)
    for place, (layout, count) in enumerate(zip(layouts, counts, strict=True)):
        widths[: len(layout.starts) - 1, place] = np.diff(layout.starts) * count
    ends = np.cumsum(widths.reshape(-1)).reshape(widths.shape)
    size = int(ends[-1, -1])
    before, cause = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    sent, takes = np.empty(size), np.empty(size)
    lasts = []
    for place, (each, layout, count) in enumerate(zip(several, layouts, counts, strict=True)):
        own = len(layout.starts) - 1
        first = (ends - widths)[:own, place] - layout.starts[:-1] * count
        passes = np.arange(layout.starts[-1])
        # The place of each pass of the first pipeline; those of the others follow. The last place is the beginning.
        at = np.append(np.repeat(first, np.diff(layout.starts)) + passes * count, size)
        inside = np.arange(count)
        here = (at[:-1, None] + inside).reshape(-1)

        def places(of: Places, at: Places = at, inside: Places = inside) -> Places:
            return np.asarray(at[of][:, None] + np.where(of >= 0, 1, 0)[:, None] * inside).reshape(-1)

        split = each.backward_s - each.weight_s if each.schedule == "zero-bubble" else each.backward_s
        costs = np.concatenate([each.forward_s, split, each.weight_s])
        before[here], cause[here] = places(layout.before), places(layout.cause)
        sent[here] = (layout.sent[:, None] * each.message_s).reshape(-1)
        takes[here] = (layout.received[:, None] * each.message_s + costs[layout.cost]).reshape(-1)
        lasts.append(at[layout.ends][:, None] + inside)
    stops = np.zeros(size + 1)
    start = 0
    for stop in ends[:, -1].tolist():
        one, other = stops.take(before[start:stop]), stops.take(cause[start:stop])
        one += sent[start:stop]
        np.maximum(one, other, out=one)
        np.add(one, takes[start:stop], out=stops[start:stop])
        start = stop
    return [stops[last].max(axis=0) for last in lasts]
