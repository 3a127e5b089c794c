"""Estimates of candidates: memory of all, time of those that fit, and what an outer level of dp adds to the rest.

An outer level is estimated on top of the group inside it: the group is a job of its own on its part of the batch, and
once a step its gradients are summed with those of the other groups, dense or compressed, or its parameters are averaged
with theirs once in several steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from shoal.cluster import Cluster
from shoal.estimate.codecs import codec_s
from shoal.estimate.cost import GOOD, PHYSICS, Inputs, Profile, inputs_for
from shoal.estimate.cost.links import path
from shoal.estimate.cost.memory import memory
from shoal.estimate.cost.price import SPLIT, step_split_s
from shoal.estimate.cost.schedule import stages
from shoal.estimate.cost.weights import weights
from shoal.estimate.errors import MEMORY_ERROR
from shoal.estimate.outer_calls import exchange_volume, hidden_steps
from shoal.estimate.simulate.costs import StepCosts, step_costs
from shoal.planning.candidates import COLUMNS, COMPRESSORS, ORDERS, Candidates, Column, distinct
from shoal.shapes.shape import Transformer
from shoal.strategy import none

BLOCK = 16_384
"""Rows estimated at a time: their columns stay in the processor's cache."""
FEW = 8
"""With at most this many rows, simulate every pipeline exactly."""
SCALE_BYTES = 4
"""Elements are compressed, and scales and averaged parameters sent, in 32 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """Candidates with their estimates. A row that does not fit has an infinite time, unless all were asked for."""

    rows: Candidates
    step_s: Column
    split_s: Mapping[str, Column]
    memory_bytes: Column
    memory_split_bytes: Mapping[str, Column]
    limit_bytes: float
    """What of a device's memory may be planned for: the rest is the margin for the prediction's error."""

    @property
    def fits(self) -> Column:
        """Memory is a hard limit."""
        return self.memory_bytes <= self.limit_bytes

    def __len__(self) -> int:
        return len(self.rows)

    def with_own_times(self) -> Priced:
        """The same with columns of times that may be changed (`put_times`)."""
        split_s = {name: column.copy() for name, column in self.split_s.items()}
        return replace(self, step_s=self.step_s.copy(), split_s=split_s)

    def put_times(self, which: Column, split_s: Mapping[str, Column]) -> None:
        """Puts other times in place for some rows."""
        for name in SPLIT:
            self.split_s[name][which] = split_s[name]
        self.step_s[which] = sum(split_s[name] for name in SPLIT)

    def chosen(self, which: Column) -> Priced:
        """Some of the rows."""
        return replace(
            self,
            rows=self.rows.rows(which),
            step_s=self.step_s[which],
            memory_bytes=self.memory_bytes[which],
            split_s={name: column[which] for name, column in self.split_s.items()},
            memory_split_bytes={name: column[which] for name, column in self.memory_split_bytes.items()},
        )


def joined(first: Priced, second: Priced) -> Priced:
    """The rows of both."""

    def both(one: Column, other: Column) -> Column:
        return np.concatenate([one, other])

    columns = {name: both(getattr(first.rows, name), getattr(second.rows, name)) for name in COLUMNS}
    kept = first.memory_split_bytes
    return replace(
        first,
        rows=first.rows.put({**columns, "sync": first.rows.sync or second.rows.sync}),
        step_s=both(first.step_s, second.step_s),
        split_s={name: both(column, second.split_s[name]) for name, column in first.split_s.items()},
        memory_bytes=both(first.memory_bytes, second.memory_bytes),
        memory_split_bytes={name: both(column, second.memory_split_bytes[name]) for name, column in kept.items()},
    )


def price_candidates(
    rows: Candidates, *, shape: Transformer, cluster: Cluster, profile: Profile = GOOD, everything: bool = False
) -> Priced:
    """Memory of every row, and time of every row that fits (`everything`: of those that do not, too).

    With at most `FEW` rows every pipeline is simulated; with more, its closed form is used (see `simulated`).
    """
    blocks = [rows.rows(slice(start, start + BLOCK)) for start in range(0, len(rows), BLOCK)] or [rows]
    parts = [
        _priced(block, shape=shape, cluster=cluster, profile=profile, everything=everything, simulate=len(rows) <= FEW)
        for block in blocks
    ]
    causes = parts[0].memory_split_bytes
    return Priced(
        rows=rows,
        step_s=np.concatenate([part.step_s for part in parts]),
        split_s={name: np.concatenate([part.split_s[name] for part in parts]) for name in SPLIT},
        memory_bytes=np.concatenate([part.memory_bytes for part in parts]),
        memory_split_bytes={name: np.concatenate([part.memory_split_bytes[name] for part in parts]) for name in causes},
        limit_bytes=parts[0].limit_bytes,
    )


def simulated(rows: Candidates, *, shape: Transformer, cluster: Cluster, profile: Profile = GOOD) -> dict[str, Column]:
    """The time of each row split by cause, with its pipeline simulated: for the rows that are shown."""
    return _split(rows, inputs_of(rows, shape=shape, cluster=cluster), profile=profile, simulate=True)


def times_s(rows: Candidates, *, shape: Transformer, cluster: Cluster, profile: Profile = GOOD) -> Column:
    """The times of `price_candidates` for rows that are known to fit."""
    inputs = inputs_of(rows, shape=shape, cluster=cluster)
    return np.asarray(sum(_split(rows, inputs, profile=profile, simulate=len(rows) <= FEW).values()))


def inputs_of(rows: Candidates, *, shape: Transformer, cluster: Cluster) -> Inputs:
    """The group inside the outer level of each row, as the cost model reads it."""
    replicas = rows.dp * rows.ep
    return inputs_for(
        shape,
        cluster,
        rows.global_batch / rows.outer,
        dp=replicas,
        tp=rows.tp,
        pp=rows.pp,
        cp=rows.cp,
        ep=rows.ep,
        ulysses=rows.ulysses,
        zero=rows.zero,
        sequence=rows.sequence,
        micro_batch=rows.micro_batch,
        chunks=rows.chunks,
        schedule=rows.schedule,
        recompute=rows.recompute,
        precision=rows.precision,
        placed=_strides(rows),
    )


def step_costs_of(rows: Candidates, *, shape: Transformer, cluster: Cluster, profile: Profile = GOOD) -> StepCosts:
    """What the events of a step of one row take, for the simulator."""
    inputs = inputs_of(rows, shape=shape, cluster=cluster)
    split = {name: column + np.zeros(1) for name, column in step_split_s(inputs, profile, simulate=False).items()}
    outer = int(rows.outer[0])
    outer_s = float(_between_groups_s(rows, inputs, split, profile=profile)[0]) if outer > 1 else 0.0
    return step_costs(
        inputs, profile, outer=outer, outer_s=outer_s, local_steps=int(rows.local[0]), devices=int(rows.world[0])
    )


def _strides(rows: Candidates) -> dict[str, Column]:
    """The stride of an axis: the product of the axes that lie inside it."""
    places = {axis: np.array([order.index(axis) for order in ORDERS])[rows.order] for axis in ORDERS[0]}
    sizes = {axis: getattr(rows, axis) for axis in ORDERS[0]}
    found = {axis: np.ones(len(rows)) for axis in ORDERS[0]}
    for axis, stride in found.items():
        for other, size in sizes.items():
            if other != axis:
                np.multiply(stride, size, out=stride, where=places[other] < places[axis])
    return found


def _priced(
    rows: Candidates, *, shape: Transformer, cluster: Cluster, profile: Profile, everything: bool, simulate: bool
) -> Priced:
    inputs = inputs_of(rows, shape=shape, cluster=cluster)
    held = memory(inputs, profile, held=stages(inputs, profile))
    size = len(rows)
    kept = {name: np.broadcast_to(column, (size,)).astype(float) for name, column in held.split_bytes.items()}
    squeezed = rows.compress > 0
    if squeezed.any():
        kept["buffers"] = kept["buffers"] + np.where(squeezed, SCALE_BYTES * _shard(inputs, rows, profile), 0.0)
    total = sum(kept.values()) + np.zeros(size)
    # A plan must fit also where its memory is measured at the end of its error range.
    limit_bytes = min(float(np.min(held.limit_bytes)), (1 - MEMORY_ERROR) * cluster.device.memory_bytes)
    timed = np.arange(size) if everything else np.flatnonzero(total <= limit_bytes)
    step_s = np.full(size, np.inf)
    split_s = {name: np.full(size, np.inf) for name in SPLIT}
    if len(timed):
        chosen = rows.rows(timed)
        found = _split(chosen, inputs.rows(timed) if size > 1 else inputs, profile=profile, simulate=simulate)
        for name in SPLIT:
            split_s[name][timed] = found[name]
        step_s[timed] = sum(found.values())
    return Priced(
        rows=rows, step_s=step_s, split_s=split_s, memory_bytes=total, memory_split_bytes=kept, limit_bytes=limit_bytes
    )


def _split(rows: Candidates, inputs: Inputs, *, profile: Profile, simulate: bool) -> dict[str, Column]:
    size = len(rows)
    found = step_split_s(inputs, profile, simulate=simulate)
    split = {name: np.broadcast_to(found[name], (size,)).astype(float) for name in SPLIT}
    outside = rows.outer > 1
    if outside.any():
        meets_s = _between_groups_s(rows, inputs, split, profile=profile)
        split["data"] = split["data"] + np.where(outside, meets_s, 0.0)
        # All nodes wait for the slowest of them, not only those of one group.
        nodes = np.maximum(1.0, rows.world / np.minimum(inputs.level_ranks[0], rows.world))
        so_far = sum(split[name] for name in SPLIT if name != "other")
        waits_s = PHYSICS.fixed_s + so_far * PHYSICS.jitter * np.log2(nodes)
        split["other"] = np.where(outside, waits_s, split["other"])
    return split


def _shard(inputs: Inputs, rows: Candidates, profile: Profile) -> Column:
    """Elements of the gradient that one rank carries to the other groups."""
    here, held = weights(inputs), stages(inputs, profile)
    own = held.most * (here.layer_dense / rows.ep + here.layer_experts) + here.embedding
    return own / rows.dp


def _between_groups_s(rows: Candidates, inputs: Inputs, split: Mapping[str, Column], *, profile: Profile) -> Column:
    """What the outer level adds to a step; under local steps, a step's part of an average."""
    links = path(inputs, profile, PHYSICS, ranks=rows.outer, stride=rows.world / rows.outer)
    elements = _shard(inputs, rows, profile)
    dense_s = links.ring_s(np.asarray(profile.gradient_bytes) * elements, rounds=2.0)
    # Only behind computing: behind other messages there is no room, they use the same links.
    last_backward_s = split["compute"] / inputs.micro_batches * 2 / 3
    shown_s = np.maximum(
        np.asarray(profile.data_exposed) * dense_s, dense_s - np.asarray(profile.data_hidden) * last_backward_s
    )
    # Islands average all that a rank holds of the parameters, with nothing to hide behind, once in `local` steps.
    held = elements * np.where(rows.zero == 0, rows.dp, 1)
    volume = _volume(rows)
    computing_s = split["compute"]
    average_s = _waited_s(rows, links.ring_s(SCALE_BYTES * held, rounds=2.0) * volume, computing_s)
    found = np.where(rows.local > 0, average_s / np.maximum(1, rows.local), shown_s)
    for code, term in enumerate(COMPRESSORS):
        here = rows.compress == code
        if isinstance(term, none) or not here.any():
            continue
        streams = inputs.memory_bytes_per_s * PHYSICS.memory
        encoded = np.where(rows.local > 0, held, elements)
        work_s = codec_s(term, encoded, ranks=rows.outer, stream_bytes_per_s=streams)
        sides = _borders(inputs, rows, profile) if term.whole_rows else None
        sent = term.ring_bytes(encoded, sides, ranks=rows.outer, itemsize=SCALE_BYTES)
        assert sent is not None, f"{term} has no estimate"
        exchange_s = links.ring_s(sent[0], rounds=sent[1]) + work_s
        period_s = np.where(rows.local > 0, _waited_s(rows, exchange_s * volume, computing_s), exchange_s)
        found = np.where(here, period_s / np.maximum(1, rows.local), found)
    return found


def _waited_s(rows: Candidates, period_s: Column, computing_s: Column) -> Column:
    """What of the exchanges of a period shows: those that overlap with steps hide behind their computing."""
    if rows.sync is None:
        return period_s
    parts = max(1, len(rows.sync.moments))
    behind = np.array([hidden_steps(rows.sync, int(steps)) for steps in np.atleast_1d(rows.local)])
    return np.asarray(parts * np.maximum(0.0, period_s / parts - behind * computing_s))


def _volume(rows: Candidates) -> Column:
    """What islands send in a period, relative to one all-reduce: a rule may send to neighbours only, or twice."""
    found = np.ones(len(rows))
    if rows.sync is not None:
        for islands in distinct(rows.outer[rows.local > 0]).tolist():
            if islands > 1:
                found[(rows.local > 0) & (rows.outer == islands)] = exchange_volume(rows.sync, islands)
    return found


def _borders(inputs: Inputs, rows: Candidates, profile: Profile) -> Column:
    """Rows and columns of all matrices on a rank, shared among the ranks of the inner level."""
    hidden, tp = inputs.hidden, inputs.tp
    kv = inputs.kv_heads * hidden / inputs.heads
    experts = np.where(inputs.experts > 0, inputs.experts / inputs.ep, 1.0)
    sides = (hidden + (hidden + 2 * kv) / tp) + (hidden / tp + hidden)
    sides = sides + experts * ((hidden + inputs.ffn * (1 + inputs.gated) / tp) + (inputs.ffn / tp + hidden))
    return (stages(inputs, profile).most * sides + inputs.vocab / tp + hidden) / rows.dp
