"""From a model and a strategy to an Engine: the terms are applied to the model one after the other.

The order matters: batch norm and recomputation change what modules compute, sharding then lays hooks around them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.group import BOOK
from shoal.comm.mesh import Members, Mesh
from shoal.parallel.batch_norm import count_once, synchronise
from shoal.parallel.data import BUCKET_BYTES, Bucket, GradientReduction, Replicas
from shoal.parallel.engine import Engine
from shoal.parallel.flat import FlatBuffer, StoredShard
from shoal.parallel.optimizer import Factory
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.runnable import require_runnable
from shoal.parallel.units import units
from shoal.parallel.zero import ParameterGathering, ShardedUnit
from shoal.strategy import Strategy, recompute

Options = Callable[[str, torch.Tensor], dict[str, Any]]
Entry = tuple[str, nn.Parameter, int]


def replicas_of(strategy: Strategy, mesh: Mesh) -> Replicas:
    """Who splits the batch, who shards, who holds copies of a shard: read off the levels of dp."""
    levels = [axis for axis in strategy.axes if axis.name.startswith("dp")]
    sharded = [axis for axis in levels if axis.term.zero]  # type: ignore[attr-defined]
    zero = sharded[0].term.zero if sharded else 0  # type: ignore[attr-defined]
    everyone = mesh.along(*(axis.name for axis in levels), label="dp")
    if not zero:
        alone = Members("dp", (mesh.rank,), 0, None)
        return Replicas(0, everyone, alone, everyone)
    copies = mesh.along(*(axis.name for axis in levels if axis is not sharded[0]))
    return Replicas(zero, everyone, mesh.along(sharded[0].name), copies)


def parallelize(
    model: nn.Module,
    strategy: Strategy,
    mesh: Mesh,
    *,
    optimizer: Factory,
    options: Options = lambda name, param: {},
    elementwise: bool = True,
    clip: float | None = None,
    batch_norm: Literal["sync", "local"] = "sync",
    bucket_bytes: int = BUCKET_BYTES,
) -> Engine:
    """Makes the model train by the strategy. All ranks call it alike; rank 0's values are everyone's start."""
    require_runnable(strategy, elementwise=elementwise)
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient; there is nothing to train")
    replicas = replicas_of(strategy, mesh)
    again = strategy.modifier(recompute)
    if batch_norm == "sync" and replicas.everyone.size > 1:
        synchronise(model, replicas.everyone)
    else:
        count_once(model)
    if again is not None:
        recompute_blocks(model, again.kind)
    known: list[dict[str, Any]] = []
    labels: dict[str, int] = {}
    for name, param in model.named_parameters():
        mine = options(name, param)
        if mine not in known:
            known.append(mine)
        labels[name] = known.index(mine)
    _same_start(model, replicas.everyone)

    parts = units(model)
    sharding = replicas.sharding
    if replicas.zero < 3:
        # Backward meets parameters in the reverse of their order, so buckets are filled from the end.
        entries = [(name, param, labels[name]) for name, param in model.named_parameters() if param.requires_grad]
        groups = _buckets(entries[::-1], bucket_bytes)
    else:
        groups = []
    buckets: list[Bucket] = []
    masters: list[torch.Tensor] = []
    offsets: list[int] = []
    gathering = None
    on_done: list[tuple[Bucket, ShardedUnit]] = []
    for group in groups:
        buffer = FlatBuffer(group, shards=sharding.size, index=sharding.index)
        buckets.append(Bucket(buffer, replicas.zero))
        masters.append(buffer.values[buffer.shard])
        offsets.append(buffer.shard.start)
    if replicas.zero == 3:
        sharded_units = []
        # Blocks from the last to the first, then the root: the order in which backward finishes them.
        for unit in [*parts[1:][::-1], parts[0]]:
            stored = []
            for group in _buckets([(name, param, labels[name]) for name, param in unit.params], None):
                buffer = FlatBuffer(group, shards=sharding.size, index=sharding.index)
                stored.append(StoredShard(buffer))
                buckets.append(Bucket(buffer, 3))
                masters.append(stored[-1].shard)
                offsets.append(buffer.shard.start)
            is_root = unit is parts[0]
            sharded = ShardedUnit(unit.name, unit.module, stored, is_root=is_root, is_last=unit is parts[-1])
            sharded_units.append(sharded)
            on_done += [(bucket, sharded) for bucket in buckets[len(buckets) - len(stored) :]]
        gathering = ParameterGathering(sharded_units, sharding)
    reduction = GradientReduction(buckets, replicas)
    if gathering is not None:
        reduction.on_done = {id(bucket): gathering.bucket_done(unit) for bucket, unit in on_done}
    return Engine(
        model=model, replicas=replicas, reduction=reduction, gathering=gathering, factory=optimizer,
        options=known, elementwise=elementwise, clip=clip, masters=masters, offsets=offsets,
    )  # fmt: skip


def _buckets(entries: list[Entry], most_bytes: int | None) -> list[list[Entry]]:
    """Consecutive parameters of one dtype, up to `most_bytes` together (a larger one stands alone)."""
    open_groups: dict[Any, list[Entry]] = {}
    done: list[list[Entry]] = []
    for entry in entries:
        param = entry[1]
        group = open_groups.setdefault((param.dtype, param.device), [])
        size = sum(p.numel() * p.element_size() for _, p, _ in group)
        if group and most_bytes is not None and size + param.numel() * param.element_size() > most_bytes:
            done.append(group)
            group = open_groups[(param.dtype, param.device)] = []
        group.append(entry)
    return done + [group for group in open_groups.values() if group]


def _same_start(model: nn.Module, everyone: Members) -> None:
    """Rank 0's parameters and buffers become everyone's, whatever each was built with."""
    if everyone.group is None:
        return
    tensors = [p.data for p in model.parameters()] + [b for b in model.buffers() if b.numel()]
    with BOOK.during("setup"), torch.no_grad():
        for tensor in tensors:
            whole = tensor.contiguous()
            dist.broadcast(whole, src=everyone.ranks[0], group=everyone.group)
            if whole is not tensor:
                tensor.copy_(whole)
