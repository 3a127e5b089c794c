"""A bucket: a flat buffer of parameters and the gradient that belongs to it, reduced by one collective.

An owner makes the buckets (`owner/`), and its kind of bucket knows how the gradient is reduced, what this rank keeps of
it, and what of it is compressed. `data.py` decides when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.mesh import Members
from shoal.parallel.flat import FlatBuffer
from shoal.parallel.placement import Family, Replicas, Route

BUCKET_BYTES = 8 << 20
"""Measured with benchmarks/train.py over Gloo on two cores; PyTorch's 25 MB leaves nothing to overlap there."""

PLAIN = Family()

SHARED = -1
"""The part of a bucket whose gradients come from several stages on this rank: it is reduced when all are done."""

NEVER = 1 << 60
"""The number of missing gradients of a bucket that is reduced only when it is flushed."""


@dataclass(frozen=True)
class Started:
    """A reduction on the wire."""

    work: Any
    """None where nothing is sent."""
    full: torch.Tensor | None = None
    """What is sent; kept until it has arrived."""
    received: torch.Tensor | None = None
    """This rank's shard of the sum, where it is kept separately."""


class Bucket(ABC):
    """A flat buffer of parameters, its gradient, and how far this step's reduction has come."""

    every_micro = False
    """Whether it is reduced after every micro-batch, and not only after the last."""
    limited = False
    """Whether few reductions may be on the wire at a time: each holds memory that sharding is to save."""
    scatters = False
    """Whether the reduction is a reduce-scatter among those that shard."""
    late = False
    """Whether the gradient is complete only when all replicas call for the optimiser's step (`Owner.collect`)."""

    def __init__(self, buffer: FlatBuffer, replicas: Replicas, *, family: Family = PLAIN, part: int = 0) -> None:
        self.buffer, self.replicas, self.family = buffer, replicas, family
        self.part = part
        """Which of the rank's pipeline stages its parameters belong to; SHARED if to several."""
        self.master = buffer.values[buffer.shard]
        """The parameters that this rank updates."""
        self.full: torch.Tensor | None = None
        """The gradient of the full buffer."""
        self.shard: torch.Tensor | None = None
        """That of this rank's shard, where it is kept separately."""
        self.views: list[torch.Tensor] = []
        self.filled = [False] * len(buffer.slots)
        self.missing = NEVER if part == SHARED else len(buffer.slots)
        self.closed = False
        """Whether it was reduced in this backward without some of its gradients."""

    @property
    def offset(self) -> int:
        """Where in the buffer the master begins, and so does what `reduced` gives."""
        return self.buffer.shard.start

    @property
    def route(self) -> Route:
        """Of a bucket that is compressed."""
        assert self.replicas.route is not None
        return self.replicas.route

    def receive(self, slot: int, gradient: torch.Tensor) -> None:
        """Takes in the gradient of one parameter."""
        if self.closed:
            raise RuntimeError(
                f"the gradient of {self.buffer.slots[slot].name} arrived after its bucket was reduced: a block before "
                "its own began its backward earlier. Train this model with zero=2"
            )
        self.allocate()
        self.write(slot, gradient)
        self.filled[slot] = True
        self.missing -= 1

    def receive_product(self, slot: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """A gradient that is a matrix product, accumulated as it is computed. Only after `keep_private`."""
        self.allocate()
        self.views[slot].addmm_(left, right, beta=1.0 if self.filled[slot] else 0.0)
        self.filled[slot] = True
        self.missing -= 1

    def allocate(self) -> torch.Tensor:
        """The full gradient, with room for what arrives."""
        if self.full is None:
            self.full = torch.zeros(self.buffer.padded, dtype=self.buffer.dtype, device=self.buffer.device)
            self.views = self.buffer.views_of(self.full)
        return self.full

    def write(self, slot: int, gradient: torch.Tensor | None) -> None:
        """Adds to the gradient of one parameter; None for a parameter that took no part."""
        view = self.views[slot]
        if gradient is None:
            view.zero_()
        elif self.filled[slot]:
            view.add_(gradient)
        else:
            view.copy_(gradient)

    def keep_private(self) -> None:  # noqa: B027
        """From now on no other rank writes to this gradient. All replicas call it alike, before a step's first one."""

    def complete(self) -> torch.Tensor:
        """The full gradient, with zeros for parameters that took no part."""
        full = self.allocate()
        for slot, filled in enumerate(self.filled):
            if not filled:
                self.write(slot, None)
        return full

    @abstractmethod
    def reduce(self) -> Started:
        """Starts the reduction of the completed gradient."""

    def arrived(self, started: Started) -> None:  # noqa: B027
        """After the reduction: takes its result."""

    @property
    def copies(self) -> Members | None:
        """The ranks over which this rank's reduced shard is summed once more, at the end of backward."""
        return None

    @abstractmethod
    def reduced(self) -> torch.Tensor:
        """What the optimiser reads: the gradient of the master."""

    # Where a level of dp compresses:

    @property
    def compressed(self) -> slice:
        """The range of the buffer that this rank compresses."""
        return self.buffer.shard

    def part_to_compress(self) -> torch.Tensor:
        """That range of the gradient, summed inside the level that compresses."""
        return self.reduced()

    def after_compression(self) -> None:
        """The compressed sum is in place: sums over the levels outside, and keeps what the optimiser reads."""
        if self.route.outside.group is not None:
            dist.all_reduce(self.reduced(), group=self.route.outside.group)

    @property
    def writes_errors(self) -> bool:
        """Whether this rank writes what compression kept to a checkpoint: of those that hold the same, one does."""
        return self.route.inside.index == 0

    def free(self) -> None:
        """Gives the full gradient back."""
        self.full, self.views = None, []

    def clear(self) -> None:
        """After the optimiser's step: the next gradients start from nothing."""
        self.filled = [False] * len(self.filled)
        if self.part == SHARED:
            self.missing = NEVER
