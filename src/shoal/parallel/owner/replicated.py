"""Replicated parameters: every rank holds all of them and makes the same update (DDP)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.parallel.bucket import Bucket, Started
from shoal.parallel.flat import FlatBuffer
from shoal.parallel.owner.base import Entry, Owner
from shoal.parallel.placement import Family, Replicas


class ReplicatedBucket(Bucket):
    """All-reduced; the full gradient stays."""

    def reduce(self) -> Started:
        group = self.replicas.everyone.group
        return Started(None if group is None else dist.all_reduce(self.full, group=group, async_op=True), self.full)

    def reduced(self) -> torch.Tensor:
        assert self.full is not None
        return self.full


class CompressedReplicatedBucket(ReplicatedBucket):
    """Reduce-scattered inside the level that compresses, so that every rank compresses a part of its own."""

    def __init__(self, buffer: FlatBuffer, replicas: Replicas, *, family: Family, part: int) -> None:
        super().__init__(buffer, replicas, family=family, part=part)
        size = buffer.padded // self.route.inside.size
        self._slice = slice(self.route.inside.index * size, (self.route.inside.index + 1) * size)

    @property
    def compressed(self) -> slice:
        return self._slice

    def reduce(self) -> Started:
        group, part = self.route.inside.group, self.part_to_compress()
        work = None if group is None else dist.reduce_scatter_single(part, self.full, group=group, async_op=True)
        return Started(work, self.full)

    def part_to_compress(self) -> torch.Tensor:
        return self.reduced()[self._slice]

    def after_compression(self) -> None:
        part = self.part_to_compress()
        if self.route.outside.group is not None:
            dist.all_reduce(part, group=self.route.outside.group)
        if self.route.inside.group is not None:
            dist.all_gather_single(self.full, part, group=self.route.inside.group)

    @property
    def writes_errors(self) -> bool:
        return True


class ReplicatedOwner(Owner):
    """Every rank updates all parameters; nothing is left to publish."""

    def _bucket(self, group: list[Entry], replicas: Replicas, family: Family, part: int) -> Bucket:
        kind = ReplicatedBucket if replicas.route is None else CompressedReplicatedBucket
        return kind(self._buffer(group, replicas), replicas, family=family, part=part)

    def publish(self) -> None:
        pass
