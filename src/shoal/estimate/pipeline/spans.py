"""The time of a pipeline, for columns of them: the only one that estimates read.

The order of passes does not depend on what they take, so each schedule is laid out once, in waves: a pass comes at
least one wave after the two it waits for (the one before it on its rank, and the one whose message it needs). All
pipelines, of whatever schedules, then walk through their waves together. A message keeps both ends busy, as in
`simulate.py`, which is the oracle of this in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoal.strategy.schedule import rank_stages, stage_rank
from shoal.strategy.zero_bubble import is_v, v_passes, zero_bubble

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]

FORWARD, BACKWARD, WEIGHT = range(3)
KINDS = {"F": FORWARD, "B": BACKWARD, "BW": BACKWARD, "W": WEIGHT}


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


def num_passes(schedule: str, *, ranks: int, chunks: int, micro: int) -> int:
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
    stages = ranks * chunks
    home = np.array([stage_rank(stage, ranks, chunks, schedule) for stage in range(stages)])
    rank, kind, stage, number = _lanes(schedule, ranks, chunks, micro)
    # Where a result comes from and goes to; beyond either end of the pipeline is nowhere.
    homes = np.concatenate([[-1], home, [-1]])
    forward = kind == FORWARD
    source, target = (np.where(forward, stage + step, stage - step) for step in (-1, 1))
    received, sent = (
        (homes[other + 1] >= 0) & (homes[other + 1] != rank) & (kind != WEIGHT) for other in (source, target)
    )
    # A result is named by its kind, stage and micro-batch in one number; the last name is that of nothing.
    nothing = 2 * stages * micro
    named = (np.where(forward, 0, stages) + stage) * micro + number
    needed = np.where(received, named + (source - stage) * micro, nothing)
    gives = np.where(kind == WEIGHT, nothing + 1, named)
    waves = _waves(needed, gives, ends=np.searchsorted(rank, np.arange(ranks), side="right"), nothing=nothing)
    order = np.argsort(waves, kind="stable")
    renamed = np.empty(len(rank) + 1, dtype=np.int64)
    renamed[order], renamed[-1] = np.arange(len(rank)), -1
    maker = np.full(nothing + 2, -1)
    maker[gives] = np.arange(len(rank))
    maker[nothing:] = -1
    first = np.append(True, rank[1:] != rank[:-1])
    before = np.where(first, -1, np.arange(-1, len(rank) - 1))
    return Laid(
        starts=np.searchsorted(waves[order], np.arange(waves.max() + 2)),
        cost=(kind * stages + stage)[order],
        before=renamed[before][order],
        cause=renamed[maker[needed]][order],
        received=received[order] * 1.0,
        sent=np.where(first, 0.0, np.roll(sent, 1))[order],
        ends=renamed[np.flatnonzero(np.append(first[1:], True))],
    )


def _lanes(schedule: str, ranks: int, chunks: int, micro: int) -> tuple[Places, Places, Places, Places]:
    """(rank, kind, stage, micro-batch) of all passes, rank by rank in their order: `strategy.schedule.actions` as
    columns, which for large pipelines takes a tenth of the time.
    """
    if schedule == "zero-bubble" and chunks > 1:
        held = [rank_stages(rank, ranks, chunks, schedule) for rank in range(ranks)]
        if is_v(held, micro):
            return _v_lanes(ranks, micro)
        orders = zero_bubble(held=held, micro=micro)
        rank = np.repeat(np.arange(ranks), [len(order) for order in orders])
        passes = np.array([(KINDS[kind], stage, number) for order in orders for kind, stage, number in order])
        return rank, passes[:, 0], passes[:, 1], passes[:, 2]
    rank, turn = (each.reshape(-1) for each in np.indices((ranks, micro * chunks)))
    if schedule == "zero-bubble":
        # In slots of F, B and W: forwards are ahead by the ranks that follow, weight gradients late by those before.
        late = np.maximum(0, rank - max(0, ranks - micro))
        keys = [3 * (turn - (ranks - 1 - rank)), 3 * turn + 1, 3 * (turn + late) + 2]
        stages, numbers = [rank] * 3, [turn] * 3
    else:
        warm_up = (chunks - 1) * ranks + (2 if schedule == "interleaved" else 1) * (ranks - 1 - rank)
        warm_up = np.minimum(warm_up if schedule != "gpipe" else micro, micro * chunks)
        keys = [turn + np.maximum(0, turn - warm_up), np.minimum(warm_up + 1 + 2 * turn, micro * chunks + turn)]
        rounds, inside = np.divmod(turn, ranks * chunks)
        chunk, place = np.divmod(inside, ranks)
        one = rounds * ranks + place if schedule == "interleaved" else turn
        chunk = chunk if schedule == "interleaved" else 0 * turn
        stages, numbers = [chunk * ranks + rank, (chunks - 1 - chunk) * ranks + rank], [one] * 2
    rank, places = np.tile(rank, len(keys)), np.concatenate(keys)
    order = np.argsort(rank * (1 + np.ptp(places)) + places)
    kind = np.repeat(np.arange(len(keys)), len(turn))
    return rank[order], kind[order], np.concatenate(stages)[order], np.concatenate(numbers)[order]


def _v_lanes(ranks: int, micro: int) -> tuple[Places, Places, Places, Places]:
    """As `_lanes`: each kind and side of a rank takes the micro-batches in turn."""
    # F, B and W of the way down, then those of the way up.
    rows = [[KINDS[kind] + 3 * side for kind, side in v_passes(rank, ranks, micro)] for rank in range(ranks)]
    orders = np.array(rows)
    number = np.empty_like(orders)
    for code in range(6):
        number[orders == code] = np.tile(np.arange(micro), ranks)
    rank = np.arange(ranks)[:, None]
    stage = np.where(orders < 3, rank, 2 * ranks - 1 - rank)
    return np.repeat(np.arange(ranks), 6 * micro), (orders % 3).reshape(-1), stage.reshape(-1), number.reshape(-1)


def _waves(needed: Places, gives: Places, *, ends: Places, nothing: int) -> Places:
    """The wave of each pass. Lanes lie end to end; in each wave every rank goes on if it has what it needs."""
    there = np.zeros(nothing + 3, dtype=bool)
    there[nothing] = True
    # Behind each lane lies a pass that needs what never comes.
    behind = ends + np.arange(len(ends))
    needed, gives = np.insert(needed, ends, nothing + 2), np.insert(gives, ends, nothing + 1)
    waves = np.full(len(needed), -1)
    at, wave = np.append(0, behind[:-1] + 1), 0
    while True:
        ready = there[needed[at]]
        goes = at[ready]
        if not len(goes):
            break
        waves[goes] = wave
        # What is made in this wave is there in the next.
        there[gives[goes]] = True
        at += ready
        wave += 1
    if (at != behind).any():
        raise ValueError("a schedule does not come to an end")
    return np.delete(waves, behind)


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
            return np.asarray(at[of][:, None] + (of >= 0)[:, None] * inside, dtype=np.int64).reshape(-1)

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
