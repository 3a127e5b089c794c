"""The ledger of a steady-state step, in closed form.

The formulas know the strategy's groups and the real, padded table of flat buffers, and nothing of how the engine
runs. A step's counted ledger must equal `predict` exactly, on every rank: tests and `shoal verify` hold it to that.

For k micro-batches and a buffer of n bytes, sharded over S ranks with C copies, P = S * C replicas in all:

    stage 0   all-reduce n over P                                         gradients, once a step
    stage 1   reduce-scatter n over S, all-reduce n/S over C              gradients, once a step
              all-gather n over S                                         parameters, once a step
    stage 2   as 1, with k reduce-scatters
    stage 3   k reduce-scatters of n over S, all-reduce n/S over C        gradients
              k all-gathers of n over S in forward, and k in backward     parameters (root and last block: forward only)
    loss      all-reduce of sum, count, stop flag and one use count for each parameter over P
    norm      all-reduce of one squared norm over S, where there are shards
    batch norm of c channels, synchronised: all-gather of 2c+1 in forward, all-reduce of 2c in backward, k times each
              (recomputed: the all-gather a second time, in backward)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.comm.ledger import Ledger, ledger_of

NUMBER_BYTES = 8
"""Sums that steer a step travel in float64."""

Call = tuple[str, str, str, int, int]
"""(axis, phase, kind, payload bytes, ranks)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One flat buffer of parameters and gradients."""

    padded_bytes: int
    regathered: bool = False
    """Stage 3: given back after forward and gathered again for backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """One synchronised batch norm."""

    channels: int
    itemsize: int
    recomputed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks along an axis, as the ledger names it."""

    axis: str
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTable:
    """What the formulas need to know of one rank's engine."""

    zero: int
    micro_batches: int
    num_parameters: int
    """Trainable tensors, not elements."""
    replicas: Group
    sharding: Group
    copies: Group
    buffers: tuple[Buffer, ...]
    norms: tuple[Norm, ...] = field(default=())


def predict(table: ShardTable) -> Ledger:
    """What one rank sends in a steady-state step."""
    calls = (*_loss(table), *_gradients(table), *_parameters(table), *_norm(table), *_batch_norm(table))
    return ledger_of(call for call in calls if call[-1] > 1)


def _loss(table: ShardTable) -> Iterator[Call]:
    yield table.replicas.axis, "loss", "all_reduce", (3 + table.num_parameters) * NUMBER_BYTES, table.replicas.ranks


def _gradients(table: ShardTable) -> Iterator[Call]:
    for buffer in table.buffers:
        n = buffer.padded_bytes
        if table.zero == 0:
            yield table.replicas.axis, "gradient", "all_reduce", n, table.replicas.ranks
            continue
        for _ in range(1 if table.zero == 1 else table.micro_batches):
            yield table.sharding.axis, "gradient", "reduce_scatter", n, table.sharding.ranks
        yield table.copies.axis, "gradient", "all_reduce", n // table.sharding.ranks, table.copies.ranks


def _parameters(table: ShardTable) -> Iterator[Call]:
    axis, ranks = table.sharding.axis, table.sharding.ranks
    for buffer in table.buffers:
        if table.zero in (1, 2):
            yield axis, "optimizer", "all_gather", buffer.padded_bytes, ranks
        if table.zero == 3:
            for _ in range(table.micro_batches):
                yield axis, "forward", "all_gather", buffer.padded_bytes, ranks
                if buffer.regathered:
                    yield axis, "backward", "all_gather", buffer.padded_bytes, ranks


def _norm(table: ShardTable) -> Iterator[Call]:
    if table.zero:
        yield table.sharding.axis, "optimizer", "all_reduce", NUMBER_BYTES, table.sharding.ranks


def _batch_norm(table: ShardTable) -> Iterator[Call]:
    axis, ranks = table.replicas.axis, table.replicas.ranks
    for norm in table.norms:
        statistics = ranks * (2 * norm.channels + 1) * norm.itemsize
        for _ in range(table.micro_batches):
            yield axis, "forward", "all_gather", statistics, ranks
            yield axis, "backward", "all_reduce", 2 * norm.channels * norm.itemsize, ranks
            if norm.recomputed:
                yield axis, "backward", "all_gather", statistics, ranks
