"""How long the passes of a step take, from the first forward to the last backward, for columns of pipelines.

Stages are put together from the parts of a micro-batch, and their schedules simulated (`pipeline/spans.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from shoal.estimate.cost.data import Sharded
from shoal.estimate.cost.inputs import SCHEDULES, Column, Inputs
from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.schedule import GPIPE, INTERLEAVED, NO_PIPELINE, PIPEDREAM, layers_of_stages, split_by_cost
from shoal.estimate.cost.time import LayerPass, LayerTime
from shoal.estimate.pipeline.spans import Pipelines, num_passes, spans_s
from shoal.strategy.schedule import stage_rank

ONE_AHEAD = SCHEDULES.index("1f1b")
MOST_PASSES = 1_500
"""Longer steps are simulated for fewer micro-batches, and the rest is added at their pace."""

PACED = (4, 5)
"""Micro-batches for each rank from which the pace is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """One micro-batch, in parts from which the passes of any stage are put together."""

    layers: Column
    cost_layers: Column
    """See `split_by_cost`."""
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
        layers = layers_of_stages(self.layers, self.cost_layers, num)
        homes = np.array([stage_rank(stage, ranks, chunks, schedule) for stage in range(num)])
        host_s = (homes != homes[-1])[:, None] * (self.host_s / chunks)
        forward, backward = layers * self.forward_s + host_s, layers * self.backward_s + host_s
        forward[-1] += self.head_forward_s
        backward[-1] += self.head_backward_s
        return forward, backward, layers * self.weight_s


def pass_parts(
    inputs: Inputs,
    profile: Profile,
    *,
    layer: LayerTime,
    heads: tuple[LayerPass, LayerPass],
    sharded: Sharded,
    message_s: Column,
) -> Passes:
    """The parts of every row."""
    # What stage 3 of ZeRO gathers comes twice on the way back.
    return Passes(
        layers=inputs.layers,
        cost_layers=split_by_cost(inputs, profile),
        forward_s=layer.forward.total_s + sharded.layer_s / 3,
        backward_s=layer.backward.total_s + sharded.layer_s * 2 / 3,
        weight_s=layer.weight_s,
        head_forward_s=heads[0].total_s + sharded.head_s / 2,
        head_backward_s=heads[1].total_s + sharded.head_s / 2,
        host_s=np.asarray(profile.host_pass_s) / 2,
        message_s=message_s,
    )


def step_spans_s(inputs: Inputs, passes: Passes) -> Column:
    """The span of every row of a pipeline; not a number where there is none, or no order of passes: without a flush,
    interleaved without rounds, with a part of a micro-batch."""
    size = len(inputs)
    ranks, chunks, micro, schedule = (
        np.broadcast_to(np.atleast_1d(each), (size,))
        for each in (inputs.pp, inputs.chunks, inputs.micro_batches, inputs.schedule)
    )
    schedule = np.where(schedule == NO_PIPELINE, ONE_AHEAD, schedule)
    chunks = np.where((schedule == GPIPE) | (schedule == ONE_AHEAD), 1, chunks)
    ordered = np.where(schedule == INTERLEAVED, (micro % ranks == 0) & (chunks > 1), schedule != PIPEDREAM)
    here = np.flatnonzero(ordered & (micro == np.floor(micro)) & (ranks > 1))
    keys, which = np.unique(
        np.stack([each[here] for each in (schedule, ranks, chunks, micro)]).astype(int), axis=1, return_inverse=True
    )
    groups = [here[which.reshape(-1) == place] for place in range(keys.shape[1])]
    found = np.full(size, np.nan)
    _fill(found, passes, {tuple(key): rows for key, rows in zip(keys.T.tolist(), groups, strict=True)})
    return found


def _fill(found: Column, passes: Passes, groups: dict[tuple[int, int, int, int], Column]) -> None:
    """Fills in the spans of rows that share (schedule, ranks, chunks, micro)."""
    every: list[Pipelines] = []
    alike = []
    for (code, ranks, chunks, micro), rows in groups.items():
        parts = passes.rows(rows, len(found))
        # Strategies that differ outside of their pipelines have the same one, which is simulated once.
        columns = np.stack([getattr(parts, field.name) for field in fields(Passes)])
        _, firsts, same = np.unique(columns, axis=1, return_index=True, return_inverse=True)
        alike.append(same.reshape(-1))
        parts = parts.rows(firsts, len(rows))
        forward, backward, weight = parts.stages(SCHEDULES[code], ranks=ranks, chunks=chunks)
        every += [
            Pipelines(
                schedule=SCHEDULES[code],
                ranks=ranks,
                chunks=chunks,
                micro=each,
                forward_s=forward,
                backward_s=backward,
                weight_s=weight,
                message_s=parts.message_s,
            )
            for each in _micro(SCHEDULES[code], ranks=ranks, chunks=chunks, micro=micro)
        ]
    spans = iter(zip(every, spans_s(every), strict=True))
    for ((_, _, _, micro), rows), same in zip(groups.items(), alike, strict=True):
        first, span_s = next(spans)
        if first.micro < micro:
            last, later_s = next(spans)
            pace_s = (later_s - span_s) / (last.micro - first.micro)
            span_s = np.maximum(later_s + (micro - last.micro) * pace_s, _busiest_s(last, micro))
        found[rows] = span_s[same]


def _busiest_s(of: Pipelines, micro: int) -> Column:
    """No step is shorter than that of any rank that never waits: until it is reached, its passes and messages, and the
    way back. The pace of a full pipeline may come to this only after many micro-batches."""
    homes = np.array([stage_rank(stage, of.ranks, of.chunks, of.schedule) for stage in range(of.ranks * of.chunks)])
    enters = np.append(False, homes[1:] != homes[:-1])[:, None] * of.message_s
    leaves = np.append(enters[1:], 0 * enters[:1], axis=0)
    here = homes == np.arange(of.ranks)[:, None]
    busy_s = here @ (of.forward_s + of.backward_s + 2 * (enters + leaves))
    there_s, back_s = (np.cumsum(each + enters, axis=0) - each - enters for each in (of.forward_s, of.backward_s))
    way_s = there_s if of.schedule == "zero-bubble" else there_s + back_s
    return np.asarray((way_s[here.argmax(axis=1)] + micro * busy_s).max(axis=0))


def _micro(schedule: str, *, ranks: int, chunks: int, micro: int) -> tuple[int, ...]:
    """The micro-batches to simulate: all of them, or two smaller numbers that show the pace of a full pipeline."""
    few = num_passes(schedule, ranks=ranks, chunks=chunks, micro=micro) <= MOST_PASSES
    return (micro,) if few or micro <= sum(PACED) * ranks else (PACED[0] * ranks, PACED[1] * ranks)
