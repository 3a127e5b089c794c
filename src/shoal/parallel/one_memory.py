"""Replicas of one host in one memory: `dp(n, via=shared())`.

A bucket's parameters lie in memory that all replicas see, and beside them each replica's gradient. When all have made
theirs, each replica sums its slice of all gradients and updates its slice of the parameters in place. Nothing is sent:
a barrier says that the gradients are there, another that the parameters are. There is one copy of parameters and
optimiser state on the host.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.comm.mesh import Members
from shoal.comm.shared_block import SharedBlock

AT_ONCE = 1 << 16
"""Elements summed at a time, so that a sum of several stays in the cache."""


class OneMemory:
    """The parameters of a bucket and the gradients of all replicas, as one of them sees them. Collective to make."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.gradients: list[torch.Tensor] = []

    def __call__(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for the parameters, and for as many gradients as there are replicas."""
        size = count * dtype.itemsize
        block = SharedBlock(self.members, (1 + self.members.size) * size)
        self.gradients = [block.tensor((1 + n) * size, count, dtype) for n in range(self.members.size)]
        return block.tensor(0, count, dtype)

    @property
    def mine(self) -> torch.Tensor:
        return self.gradients[self.members.index]

    def sum_slice(self, part: slice) -> None:
        """The sum over replicas, in their order, into this one's own gradient. Only who owns the slice reads it."""
        for start in range(part.start, part.stop, AT_ONCE):
            some = slice(start, min(start + AT_ONCE, part.stop))
            total = self.gradients[0][some]
            for other in self.gradients[1:]:
                total = total + other[some]
            if self.members.size > 1:
                self.mine[some] = total

    def meet(self) -> None:
        """Goes on when all replicas have come so far."""
        if self.members.group is not None:
            dist.barrier(group=self.members.group)
