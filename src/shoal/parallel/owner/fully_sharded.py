"""ZeRO 3: each rank holds its shard of the parameters; a block's are gathered while it computes (`zero.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from shoal.comm.group import BACKENDS
from shoal.layout.blocks import units
from shoal.parallel.bucket import PLAIN, SHARED, Bucket
from shoal.parallel.flat import StoredShard
from shoal.parallel.flat_slice import Piece
from shoal.parallel.offload.offloading import parameters_in_use
from shoal.parallel.owner.sharded import ShardedOwner
from shoal.parallel.zero import ParameterGathering, ReadsOutside, ShardedUnit


class FullySharded(ShardedOwner):
    """Stage 3."""

    keeps_full = False
    hint = (
        "; with zero=3 a block's parameters read as NaN outside the block's own forward: use them there only, or "
        "train with zero=2"
    )

    def __init__(self, *given: Any, **named: Any) -> None:
        self._buckets_of: dict[int, list[Bucket]] = {}
        super().__init__(*given, **named)
        gathering, reduction = self.gathering, self.reduction
        reduction.before_scatter = gathering.require_same
        for unit in gathering.units:
            done = gathering.bucket_done(unit)
            reduction.on_done |= {id(bucket): done for bucket in self._buckets_of[id(unit)]}
        gathering.close_partial = lambda unit: reduction.close_partial(self._buckets_of[id(unit)])

    def _lay_out(self, model: nn.Module, bucket_bytes: int) -> None:
        sharded_units, parts, below = [], units(model), self.offloading.levels.get("parameters")
        # Blocks from the last to the first, then the root: the order in which backward finishes them.
        for unit in [*parts[1:][::-1], parts[0]]:
            stored, own = [], []
            for group in self._groups(list(unit.params), None):
                bucket = self._add(group)
                stored.append(StoredShard(bucket.buffer, below))
                bucket.master = stored[-1].shard
                if stored[-1].place is not None:
                    self.places[id(bucket)] = stored[-1].place
                own.append(bucket)
            # What ranks share beyond this one's stages (a tied weight) does not say where the block computes.
            part = min((bucket.part for bucket in own if bucket.part != SHARED), default=SHARED if own else 0)
            sharded = ShardedUnit(
                unit.name,
                unit.module,
                stored,
                is_root=unit is parts[0],
                is_last=unit is parts[-1] and self.cut.staged is None,
                part=part,
            )
            sharded_units.append(sharded)
            self._buckets_of[id(sharded)] = own
        sharding = self.placement.replicas(PLAIN).sharding
        by_host = None
        if next(model.parameters()).device.type != "cpu" and sharding.group is not None:
            by_host = self.placement.mesh.another_along(str(self.placement.sharded), backend=BACKENDS["shoal"])
        self.gathering = ParameterGathering(sharded_units, sharding, by_host, below)
        if below is not None:
            shards = [(shard, unit.is_root) for unit in sharded_units for shard in unit.shards]
            used = parameters_in_use(shards)
            self.offloading.in_use["blocks"] = lambda: used

    def begin_forward(self, part: int) -> None:
        self.gathering.begin_forward(part)

    def release(self, *, root: bool = True) -> None:
        self.gathering.finish(root=root)

    def explaining(self) -> AbstractContextManager[None]:
        return self.gathering.explaining()

    def publish(self) -> None:
        self.release()  # What is still gathered is out of date.

    def watch_reads(self) -> ReadsOutside:
        return ReadsOutside(self.gathering)

    def full_values(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for unit in self.gathering.units:
            gathered = unit.gathered
            self.gathering.gather(unit, "checkpoint")
            for shard in unit.shards:
                for slot in shard.buffer.slots:
                    yield slot.param, slot.param.detach()
            if not gathered:
                self.gathering.free(unit)

    def held(self) -> Iterator[Piece]:
        yield from self.pieces_of(self.masters, lambda bucket: (0, bucket.buffer.padded))

    def close(self) -> None:
        super().close()
        self.gathering.remove()
