"""The ledger of a steady-state step, in closed form.

What the other axes send (pipeline, tensor, context, experts) has formulas of its own, whose calls the table carries.
The formulas know the strategy's groups and the real, padded table of flat buffers, and nothing of how the engine
runs. A step's counted ledger must equal `predict` exactly, on every rank: tests and `shoal verify` hold it to that.

For k micro-batches and a buffer of n bytes, sharded over S ranks with C copies, P = S * C replicas in all:

    stage 0   all-reduce n over P                                         gradients, once a step
    stage 1   reduce-scatter n over S, all-reduce n/S over C              gradients, once a step
              all-gather n over S                                         parameters, once a step
    stage 2   as 1, with k reduce-scatters
    stage 3   k reduce-scatters of n over S, all-reduce n/S over C        gradients
              k all-gathers of n over S in forward, and k in backward     parameters (root and last block: forward only)
    compress  inside the level: reduce-scatter and all-gather of n (stage 0), as above (sharded there), or all-reduce n
              (the level shards itself); between: payloads (`comm/compress/traffic.py`) and an all-reduce of what is not
              compressed; outside: all-reduce of this rank's part
    loss      all-reduce of sum, count, stop flag, two numbers for the noise of gradients and one use count for each
              parameter over all ranks
    norm      all-reduce of one squared norm over the ranks that hold different parts of the model
    PipeDream as stage 0, gradients and norm k times; for each of the k updates an all-reduce of sum, count and use
              counts over those who work on the stage; loss: sum, count, stop flag and squared norm over all ranks
    batch norm of c channels, synchronised: all-gather of 2c+1 in forward, all-reduce of 2c in backward, k times each
              (recomputed: the all-gather a second time, in backward)
    optimisers of full parameters, where ranks hold pieces: two all-to-alls (`full_parameters.py`)
    buffers that the job declares: all-reduce of 1 and of each averaged or summed number, broadcast of the others
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from shoal.comm.ledger import Choose, Ledger, ledger_of
from shoal.strategy.terms.compress import Transfer

NUMBER_BYTES = 8
"""Sums that steer a step travel in float64."""

Call = tuple[str, str, str, int, int]
"""(axis, phase, kind, payload bytes, ranks)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks along an axis, as the ledger names it."""

    axis: str
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Compressed:
    """How the gradient of a buffer goes where a level of dp compresses it."""

    inside: Group
    between: Group
    outside: Group
    whole: bool
    """Whether the level also shards, so that full gradients are compressed."""
    transfers: tuple[Transfer, ...]
    """What goes between: the payloads, and what is not compressed."""


@dataclass(frozen=True, slots=True)
class PredictedSlot:
    """Where a parameter lies in its buffer."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One flat buffer of parameters and gradients."""

    padded_bytes: int
    replicas: Group
    sharding: Group
    copies: Group
    compressed: Compressed | None = None
    """Where a level of dp compresses its gradient."""
    reductions: int = 1
    """Reduce-scatters in a step; all-reduces, where nothing is sharded."""
    forward_gathers: int = 0
    backward_gathers: int = 0
    """Stage 3: how often it is gathered in a step."""
    pieces: tuple[tuple[str, int], ...] = ()
    """Parameters in this rank's shard of it, and how many elements of each."""
    itemsize: int = 4
    slots: tuple[PredictedSlot, ...] = ()
    shard: int = 0
    """Which of the shards this rank has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """One synchronised batch norm."""

    channels: int
    itemsize: int
    recomputed: bool = False
    learns: bool = True
    """Whether backward comes to it."""
    group: Group | None = None
    """The ranks that share its statistics; None: those that split the samples."""
    module: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTable:
    """What the formulas need to know of one rank's engine."""

    zero: int
    micro_batches: int
    num_parameters: int
    """Trainable tensors of the full model, not elements."""
    world: Group
    norm: Group
    samples: Group
    buffers: tuple[Buffer, ...]
    one_memory: bool = False
    """Whether those that shard see each other's memory: they meet, and send nothing."""
    norms: tuple[Norm, ...] = field(default=())
    update: tuple[Call, ...] = field(default=())
    """What an optimiser of full parameters sends (`full_parameters.py`), in each update."""
    calls: tuple[Call, ...] = field(default=())
    """What the other axes send in a step, by their own formulas."""
    stage: Group | None = None
    """PipeDream: those who work on this rank's stage, which updates after every micro-batch; `norm` is then of them
    and `num_parameters` of the stage."""


def predict(table: ShardTable, choose: Choose = lambda axis, kind, payload_bytes, ranks: None) -> Ledger:
    """What one rank sends in a steady-state step; `choose` names the backend's algorithms, where it has several."""
    return ledger_of(calls_of(table), choose)


def calls_of(table: ShardTable) -> list[Call]:
    """Every collective of a steady-state step, those of the other axes included."""
    found = (
        *loss_calls(table),
        *gradient_calls(table),
        *parameter_calls(table),
        *norm_calls(table),
        *update_calls(table),
        *batch_norm_calls(table),
        *table.calls,
    )
    return [call for call in found if call[-1] > 1]


def loss_calls(table: ShardTable) -> Iterator[Call]:
    """Of what steers a step: loss, count, stop flag, noise."""
    if table.stage is None:
        yield table.world.axis, "loss", "all_reduce", (5 + table.num_parameters) * NUMBER_BYTES, table.world.ranks
        return
    yield table.world.axis, "loss", "all_reduce", 4 * NUMBER_BYTES, table.world.ranks
    for _ in range(table.micro_batches):
        yield table.stage.axis, "loss", "all_reduce", (2 + table.num_parameters) * NUMBER_BYTES, table.stage.ranks


def gradient_calls(table: ShardTable) -> Iterator[Call]:
    """Of gradients."""
    if table.one_memory:
        yield table.buffers[0].sharding.axis, "gradient", "barrier", 0, table.buffers[0].sharding.ranks
    for buffer in table.buffers:
        n = buffer.padded_bytes
        if buffer.compressed is not None:
            yield from _compressed(table, buffer, buffer.compressed)
            continue
        if table.zero == 0:
            for _ in range(buffer.reductions):
                yield buffer.replicas.axis, "gradient", "all_reduce", n, buffer.replicas.ranks
            continue
        for _ in range(0 if table.one_memory else buffer.reductions):
            yield buffer.sharding.axis, "gradient", "reduce_scatter", n, buffer.sharding.ranks
        yield buffer.copies.axis, "gradient", "all_reduce", n // buffer.sharding.ranks, buffer.copies.ranks


def _compressed(table: ShardTable, buffer: Buffer, way: Compressed) -> Iterator[Call]:
    n, inside = buffer.padded_bytes, way.inside
    shard = n // buffer.sharding.ranks
    if table.zero == 0:
        yield inside.axis, "gradient", "reduce_scatter", n, inside.ranks
        yield inside.axis, "gradient", "all_gather", n, inside.ranks
        shard = n // inside.ranks
    elif way.whole:
        yield inside.axis, "gradient", "all_reduce", n, inside.ranks
    else:
        for _ in range(0 if table.one_memory else buffer.reductions):
            yield buffer.sharding.axis, "gradient", "reduce_scatter", n, buffer.sharding.ranks
        yield inside.axis, "gradient", "all_reduce", shard, inside.ranks
    for kind, payload_bytes in way.transfers:
        yield way.between.axis, "gradient", kind, payload_bytes, way.between.ranks
    yield way.outside.axis, "gradient", "all_reduce", shard, way.outside.ranks


def parameter_calls(table: ShardTable) -> Iterator[Call]:
    """Of parameters that are sharded."""
    if table.one_memory:
        yield table.buffers[0].sharding.axis, "optimizer", "barrier", 0, table.buffers[0].sharding.ranks
        return
    for buffer in table.buffers:
        axis, ranks = buffer.sharding.axis, buffer.sharding.ranks
        if table.zero in (1, 2):
            yield axis, "optimizer", "all_gather", buffer.padded_bytes, ranks
        for _ in range(buffer.forward_gathers):
            yield axis, "forward", "all_gather", buffer.padded_bytes, ranks
        for _ in range(buffer.backward_gathers):
            yield axis, "backward", "all_gather", buffer.padded_bytes, ranks


def norm_calls(table: ShardTable) -> Iterator[Call]:
    """Of the norm of the gradient."""
    for _ in range(table.micro_batches if table.stage is not None else 1):
        yield table.norm.axis, "optimizer", "all_reduce", NUMBER_BYTES, table.norm.ranks


def update_calls(table: ShardTable) -> Iterator[Call]:
    """Of an optimiser of full parameters."""
    for _ in range(table.micro_batches if table.stage is not None else 1):
        yield from table.update


def batch_norm_calls(table: ShardTable) -> Iterator[Call]:
    """Of synchronised batch norms."""
    for norm in table.norms:
        group = table.samples if norm.group is None else norm.group
        axis, ranks = group.axis, group.ranks
        statistics = ranks * (2 * norm.channels + 1) * norm.itemsize
        for _ in range(table.micro_batches):
            yield axis, "forward", "all_gather", statistics, ranks
            if norm.learns:
                yield axis, "backward", "all_reduce", 2 * norm.channels * norm.itemsize, ranks
            if norm.recomputed:
                yield axis, "backward", "all_gather", statistics, ranks
