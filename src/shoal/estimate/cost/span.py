"""How long the passes of a step take, from the first forward to the last backward: exact, for columns of pipelines.

The span of a schedule is its longest chain of passes that wait for each other. For gpipe and 1f1b the chains that can
be longest are few enough to be written down, whatever each stage takes; interleaved and zero-bubble pipelines are
played.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from shoal.estimate.cost.data import Sharded
from shoal.estimate.cost.inputs import SCHEDULES, Column, Inputs
from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.schedule import GPIPE, INTERLEAVED, ZERO_BUBBLE, dealt_by_cost, layers_of_stages
from shoal.estimate.cost.time import LayerTime, Pass
from shoal.estimate.pipeline.spans import Pipelines
from shoal.estimate.pipeline.spans import passes_of as passes_in
from shoal.estimate.pipeline.spans import spans_s as played_s
from shoal.strategy.schedule import stage_rank

NONE, ONE_AHEAD = SCHEDULES.index("none"), SCHEDULES.index("1f1b")
MOST_PASSES = 1_500
"""Longer steps are played for fewer micro-batches, and the rest is added at their pace."""

PACED = (4, 6)
"""So many micro-batches for each rank tell the pace."""
BLOCK = 16_384
"""Stages x rows at a time, which stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """One micro-batch, in parts from which the passes of any stage are put together."""

    layers: Column
    dealt: Column
    """See `dealt_by_cost`."""
    forward_s: Column
    """Of one layer."""
    backward_s: Column
    weight_s: Column
    """The part of the backward that a split backward puts off."""
    head_forward_s: Column
    head_backward_s: Column
    host_s: Column
    """The host's, for a rank each way; where the loss is, it is a part of the head's."""
    message_s: Column

    def rows(self, chosen: Column, size: int) -> Passes:
        """Some of `size` rows."""
        columns = {field.name: np.atleast_1d(getattr(self, field.name)) for field in fields(self)}
        return Passes(**{name: np.broadcast_to(column, (size,))[chosen] for name, column in columns.items()})

    def stages(self, schedule: str, *, ranks: int, chunks: int) -> tuple[Column, Column, Column]:
        """(forward, backward, its weight part) of every stage: stages x rows."""
        num = ranks * chunks
        layers = layers_of_stages(self.layers, self.dealt, num)
        homes = np.array([stage_rank(stage, ranks, chunks, schedule) for stage in range(num)])
        host_s = (homes != homes[-1])[:, None] * (self.host_s / chunks)
        forward, backward = layers * self.forward_s + host_s, layers * self.backward_s + host_s
        forward[-1] += self.head_forward_s
        backward[-1] += self.head_backward_s
        return forward, backward, layers * self.weight_s


def passes_of(
    inputs: Inputs, profile: Profile, *, layer: LayerTime, heads: tuple[Pass, Pass], sharded: Sharded, message_s: Column
) -> Passes:
    """The parts of every row."""
    # What stage 3 of ZeRO gathers comes twice on the way back.
    return Passes(
        layers=inputs.layers, dealt=dealt_by_cost(inputs, profile),
        forward_s=layer.forward.total_s + sharded.layer_s / 3,
        backward_s=layer.backward.total_s + sharded.layer_s * 2 / 3,
        weight_s=layer.weight_s,
        head_forward_s=heads[0].total_s + sharded.head_s / 2, head_backward_s=heads[1].total_s + sharded.head_s / 2,
        host_s=np.asarray(profile.host_pass_s) / 2, message_s=message_s,
    )  # fmt: skip


def spans_s(inputs: Inputs, passes: Passes, *, play: bool) -> Column:
    """The span of every row of a pipeline whose schedule is known; not a number for the others, and for all of them
    without `play`."""
    size = len(inputs)
    found = np.full(size, np.nan)
    if not play:
        return found
    ranks, chunks, micro, schedule = (
        np.broadcast_to(np.atleast_1d(each), (size,))
        for each in (inputs.pp, inputs.chunks, inputs.micro_batches, inputs.schedule)
    )
    closed = {GPIPE: schedule == GPIPE, ONE_AHEAD: (schedule == ONE_AHEAD) | (schedule == NONE)}
    for num in np.unique(ranks[ranks > 1]).astype(int).tolist():
        for code, mask in closed.items():
            alike = np.flatnonzero(mask & (ranks == num))
            for here in np.split(alike, range(0, len(alike), max(1, BLOCK // num))[1:]):
                parts = passes.rows(here, size)
                forward, backward, _ = parts.stages(SCHEDULES[code], ranks=num, chunks=1)
                span = _gpipe_s if code == GPIPE else _in_turns_s
                found[here] = span(forward, backward, parts.message_s, micro[here])
    rounds = np.where(schedule == INTERLEAVED, (micro % ranks == 0) & (chunks > 1), schedule == ZERO_BUBBLE)
    here = np.flatnonzero(rounds & (micro == np.floor(micro)) & (ranks > 1))
    keys, which = np.unique(
        np.stack([each[here] for each in (schedule, ranks, chunks, micro)]).astype(int), axis=1, return_inverse=True
    )
    groups = [here[which.reshape(-1) == place] for place in range(keys.shape[1])]
    _play(found, passes, {tuple(key): rows for key, rows in zip(keys.T.tolist(), groups, strict=True)})
    return found


def _gpipe_s(forward: Column, backward: Column, message_s: Column, micro: Column) -> Column:
    """The first micro-batch's way there and the last one's way back, and the slowest forward and the slowest backward
    for each of the others. A rank is busy with the messages to and from its neighbours as well.
    """
    own_s = _neighbours(len(forward)) * message_s
    way_s = (forward + backward).sum(axis=0) + 2 * (len(forward) - 1) * message_s
    return np.asarray(way_s + (micro - 1) * ((forward + own_s).max(axis=0) + (backward + own_s).max(axis=0)))


def _in_turns_s(forward: Column, backward: Column, message_s: Column, micro: Column) -> Column:
    """1f1b.

    Count a rank's time in slots, one backward each: rank r of n has w = n - 1 - r forwards before the first slot, and
    no forwards in the last w slots. A chain moves on to the next rank with a forward, which takes it one slot further,
    or back with a backward in the same slot, or stays: before the first slot at a rank's forwards, in the last slots at
    its backwards, between them at both. It pays to stay between them at one rank only. So a chain goes from the first
    rank down to some other, waiting w times at the slowest forward passed; back to the rank where it stays; down again
    and back to the first, waiting w times at the slowest backward. Ranks that have no slot with both (few
    micro-batches) let it stay longer at forwards or at backwards alone.
    """
    num = len(forward)
    rank = np.arange(num)[:, None]
    left, right = (rank > 0) * 2 * message_s, (rank < num - 1) * 2 * message_s
    own_s = _neighbours(num) * message_s
    waits = num - 1 - rank
    turns = micro - 1 - waits
    slow_forward, slow_backward = forward + own_s, backward + own_s
    longest_forward, longest_backward = (np.maximum.accumulate(each) for each in (slow_forward, slow_backward))
    there, back = np.cumsum(forward, axis=0), np.cumsum(backward, axis=0)
    way_s = there + back + 2 * rank * message_s + right
    # Down to a rank and back once, staying where it turns.
    once = way_s + np.where(
        turns >= 0,
        waits * (longest_forward + longest_backward) + turns * (slow_forward + slow_backward),
        (micro - 1) * (longest_forward + longest_backward),
    )
    found = once.max(axis=0)
    apart = turns <= 0
    if apart.any():
        alone_forward, alone_backward = (np.maximum.accumulate(each * apart) for each in (slow_forward, slow_backward))
        longer = np.maximum(
            waits * longest_forward + (micro - 1) * alone_backward,
            (micro - 1) * alone_forward + waits * longest_backward,
        )
        found = np.maximum(found, np.where(turns >= 0, way_s + longer, 0.0).max(axis=0))
    # Down and back, staying on the way, down and back again.
    deepest = [
        np.maximum.accumulate((way_s + waits * longest)[::-1])[::-1] for longest in (longest_forward, longest_backward)
    ]
    twice = (
        deepest[0] + deepest[1] - (back - backward) - there - 2 * rank * message_s
        + turns * (forward + left) + (turns - 1) * (backward + right)
    )  # fmt: skip
    return np.asarray(np.maximum(found, np.where(turns >= 1, twice, 0.0).max(axis=0)))


def _neighbours(num: int) -> Column:
    """Of each rank, as a column."""
    rank = np.arange(num)[:, None]
    return (rank > 0) * 1.0 + (rank < num - 1)


def _play(found: Column, passes: Passes, groups: dict[tuple[int, int, int, int], Column]) -> None:
    """Fills in the spans of rows that share (schedule, ranks, chunks, micro)."""
    every: list[Pipelines] = []
    for (code, ranks, chunks, micro), rows in groups.items():
        parts = passes.rows(rows, len(found))
        forward, backward, weight = parts.stages(SCHEDULES[code], ranks=ranks, chunks=chunks)
        every += [
            Pipelines(
                schedule=SCHEDULES[code], ranks=ranks, chunks=chunks, micro=each,
                forward_s=forward, backward_s=backward, weight_s=weight, message_s=parts.message_s,
            )
            for each in _played_micro(SCHEDULES[code], ranks=ranks, chunks=chunks, micro=micro)
        ]  # fmt: skip
    spans = iter(played_s(every))
    for (code, ranks, chunks, micro), rows in groups.items():
        counts = _played_micro(SCHEDULES[code], ranks=ranks, chunks=chunks, micro=micro)
        some = [next(spans) for _ in counts]
        found[rows] = some[-1]
        if len(counts) == 2:
            pace_s = (some[1] - some[0]) / (counts[1] - counts[0])
            found[rows] += (micro - counts[1]) * pace_s


def _played_micro(schedule: str, *, ranks: int, chunks: int, micro: int) -> tuple[int, ...]:
    """The micro-batches to play: all of them, or two smaller numbers that tell the pace of a full pipeline."""
    whole = passes_in(schedule, ranks=ranks, chunks=chunks, micro=micro) <= MOST_PASSES
    return (micro,) if whole or micro <= sum(PACED) * ranks else (PACED[0] * ranks, PACED[1] * ranks)
