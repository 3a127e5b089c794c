"""Shared memory: the replicas of a host hold parameters once, and each updates its slice (`dp(n, via=shared())`).

Nothing is sent: one barrier waits for the gradients of all replicas, another for the updated
parameters. `shared_buffers.py` lays out the gradients.
"""

from __future__ import annotations

import torch

from shoal.comm.ledger import BOOK
from shoal.comm.shared_block import SharedBlock
from shoal.parallel.bucket import SHARED, Bucket, Started
from shoal.parallel.data import sum_copies
from shoal.parallel.flat import FlatBuffer
from shoal.parallel.owner.base import Entry, Owner
from shoal.parallel.owner.sharded import ShardedBucket
from shoal.parallel.owner.shared_buffers import SharedBuffers
from shoal.parallel.placement import Family, Replicas


class SharedMemoryBucket(ShardedBucket):
    """Other replicas read its gradient where it is, and one of them may write to it."""

    limited = False
    scatters = False
    late = True

    def __init__(
        self, buffer: FlatBuffer, replicas: Replicas, *, family: Family, part: int, memory: SharedBuffers
    ) -> None:
        super().__init__(buffer, replicas, family=family, part=part)
        self.memory = memory
        self._pieces: list[list[tuple[int, torch.Tensor]]] = []
        """Of a gradient that another replica writes to as well, what is written at a time."""
        if part == SHARED:
            self.keep_private()

    def allocate(self) -> torch.Tensor:
        if self.full is None:
            self.full = self.memory.mine
            self.views = self.buffer.views_of(self.full)
            if not self.memory.private:
                self._pieces = self.memory.pieces(self.views)
        return self.full

    def write(self, slot: int, gradient: torch.Tensor | None) -> None:
        if self.memory.private:
            super().write(slot, gradient)
        else:
            self.memory.add(self._pieces[slot], gradient)

    def keep_private(self) -> None:
        if not self.memory.private:
            self.memory.private = True
            self.full = None

    def reduce(self) -> Started:
        return Started(None)

    def clear(self) -> None:
        super().clear()
        self.memory.next_step()


class SharedMemoryOwner(Owner):
    """Replicas in shared memory."""

    private_gradients = False

    buckets: list[SharedMemoryBucket]  # type: ignore[assignment]
    _locks: SharedBlock | None = None

    def _bucket(self, group: list[Entry], replicas: Replicas, family: Family, part: int) -> Bucket:
        self._locks = self._locks or SharedBlock(replicas.sharding, 0, keep_open=True)
        memory = SharedBuffers(replicas.sharding, self._locks, bucket=len(self.buckets), slots=len(group))
        buffer = self._buffer(group, replicas, memory)
        return SharedMemoryBucket(buffer, replicas, family=family, part=part, memory=memory)

    def collect(self) -> None:
        """Waits for the gradients of all replicas and sums them. Not earlier: a rank may read parameters until it calls
        for the step, and the others update them after this."""
        if not self.buckets:
            return
        with BOOK.during("gradient"):
            self.barrier()
        for bucket in self.buckets:
            bucket.memory.sum_slice(bucket.buffer.shard)
        sum_copies(self.buckets)

    def publish(self) -> None:
        self.barrier()

    def barrier(self) -> None:
        if self.buckets:
            self.buckets[0].memory.barrier()

    def close(self) -> None:
        for bucket in self.buckets:
            for slot in bucket.buffer.slots:
                slot.param.data = slot.param.data.clone()  # Its own again.
            bucket.memory.close()
