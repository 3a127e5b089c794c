"""HOGWILD (Niu et al. 2011): the replicas of a host read and write one copy of the parameters, without locks.

Each replica computes a ticket with whatever values the parameters have while it does, and steps its own optimiser in
place on them. Updates may interleave element by element, and one that is written while another is being written may be
lost. Gradients and the state of the optimiser are each replica's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.ledger import BOOK
from shoal.comm.shared_block import SharedBlock
from shoal.parallel.bucket import Bucket
from shoal.parallel.cutting import CutModel
from shoal.parallel.flat_slice import SavedState
from shoal.parallel.offload.offloading import Offloading
from shoal.parallel.optimizer import Recipe
from shoal.parallel.owner.base import Entry, Gradients, Owner
from shoal.parallel.owner.replicated import ReplicatedBucket
from shoal.parallel.placement import Family, Placement, Replicas
from shoal.parallel.shared_tickets import SharedTickets


class HogwildOwner(Owner):
    """Parameters in shared memory that every replica updates."""

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        cut: CutModel,
        recipe: Recipe,
        *,
        bucket_bytes: int,
        offloading: Offloading | None = None,
    ) -> None:
        super().__init__(model, placement, cut, recipe, bucket_bytes=bucket_bytes, offloading=offloading)
        self.tickets = SharedTickets(placement.islands)
        self._all_here()  # Every replica has written the same start.

    def _all_here(self) -> None:
        if self.placement.islands.group is not None:
            with BOOK.during("setup"):
                dist.barrier(group=self.placement.islands.group)

    def _bucket(self, group: list[Entry], replicas: Replicas, family: Family, part: int) -> Bucket:
        buffer = self._buffer(group, replicas, self._room)
        return ReplicatedBucket(buffer, replicas, family=family, part=part)

    def _room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return SharedBlock(self.placement.islands, count * dtype.itemsize).tensor(0, count, dtype)

    def update(
        self, gradients: Gradients, *, lr_factor: float, closure: Callable[[], torch.Tensor] | None = None
    ) -> None:
        super().update(gradients, lr_factor=lr_factor, closure=closure)
        assert isinstance(self.tickets, SharedTickets)
        self.tickets.finish()

    def publish(self) -> None:
        """The others read the values where they are."""

    def resume(self, step: int, saved: SavedState) -> None:
        assert isinstance(self.tickets, SharedTickets)
        self.tickets.begin(step)
        self._all_here()

    def close(self) -> None:
        self._all_here()  # None changes what another copies.
        for bucket in self.buckets:
            for slot in bucket.buffer.slots:
                slot.param.data = slot.param.data.clone()
        assert self.tickets is not None
        self.tickets.close()
