"""ZeRO 1 and 2: each rank updates its shard of the parameters, and an all-gather gives every rank the others'."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.comm.mesh import Members
from shoal.parallel.bucket import Bucket, Started
from shoal.parallel.owner.base import Entry, Owner
from shoal.parallel.placement import Family, Replicas


class ShardedBucket(Bucket):
    """Stage 1: reduce-scattered after the last micro-batch; the full gradient stays until the next step."""

    limited = True
    scatters = True

    def reduce(self) -> Started:
        group, full = self.replicas.sharding.group, self.full
        if group is None:
            return Started(None, full)
        return Started(dist.reduce_scatter_single(self.reduced(), full, group=group, async_op=True), full)

    @property
    def copies(self) -> Members | None:
        return self.replicas.copies if self.replicas.route is None else self.route.inside

    def reduced(self) -> torch.Tensor:
        assert self.full is not None
        return self.full[self.buffer.shard]


class FreedBucket(ShardedBucket):
    """Stages 2 and 3: reduce-scattered after every micro-batch and freed; the shard accumulates."""

    every_micro = True

    def reduce(self) -> Started:
        full = self.full
        assert full is not None
        received = torch.empty_like(full[self.buffer.shard])
        group = self.replicas.sharding.group
        if group is None:
            received.copy_(full)
        work = None if group is None else dist.reduce_scatter_single(received, full, group=group, async_op=True)
        self.free()
        self.filled = [False] * len(self.filled)
        return Started(work, full, received)

    def arrived(self, started: Started) -> None:
        assert started.received is not None
        if self.shard is None:
            self.shard = started.received
        else:
            self.shard.add_(started.received)

    def reduced(self) -> torch.Tensor:
        assert self.shard is not None
        return self.shard

    def clear(self) -> None:
        super().clear()
        self.shard = None


class CompressedShardedBucket(ShardedBucket):
    """Where the level that shards also compresses: the full gradient is compressed, and each rank keeps its shard of
    the sum, in stages 2 and 3 that alone."""

    scatters = False
    frees = False

    def reduce(self) -> Started:
        group = self.route.inside.group
        return Started(None if group is None else dist.all_reduce(self.full, group=group, async_op=True), self.full)

    @property
    def copies(self) -> Members | None:
        return None

    @property
    def compressed(self) -> slice:
        return slice(0, self.buffer.padded)

    def part_to_compress(self) -> torch.Tensor:
        assert self.full is not None
        return self.full

    def after_compression(self) -> None:
        if self.frees:
            self.shard = super().reduced().clone()
            self.free()
        super().after_compression()

    def reduced(self) -> torch.Tensor:
        return super().reduced() if self.shard is None else self.shard

    def clear(self) -> None:
        super().clear()
        self.shard = None


class CompressedFreedBucket(CompressedShardedBucket):
    frees = True


class ShardedOwner(Owner):
    """Stages 1 and 2."""

    def _bucket(self, group: list[Entry], replicas: Replicas, family: Family, part: int) -> Bucket:
        kept, freed = ShardedBucket, FreedBucket
        if replicas.route is not None and replicas.route.whole:
            kept, freed = CompressedShardedBucket, CompressedFreedBucket  # type: ignore[assignment]
        kind = kept if self.placement.zero == 1 else freed
        return kind(self._buffer(group, replicas), replicas, family=family, part=part)

    def publish(self) -> None:
        works = []
        for bucket in self.buckets:
            values, group = bucket.buffer.values, bucket.replicas.sharding.group
            if group is not None:
                works.append(dist.all_gather_single(values, bucket.master, group=group, async_op=True))
        for work in works:
            work.wait()
