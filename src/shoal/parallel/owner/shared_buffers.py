"""The memory that replicas of one host share: parameters once, and their gradients.

Two replicas share one gradient buffer: the first to arrive writes, the second adds, and the sum of two is the same in
either order. When all gradients are there, each replica sums its slice of all buffers and updates its slice of the
parameters in place. There is one copy of parameters and optimiser state on the host, and a gradient buffer for every
two replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shoal.comm.mesh import Members
from shoal.comm.points import reach
from shoal.comm.shared_block import SharedBlock

AT_ONCE = 1 << 16
"""Elements summed at a time, so that a sum of several stays in the cache."""
LOCKED_AT_ONCE = 1 << 18
"""Elements of a gradient written under one lock: a second replica follows the first through a large one."""
WORD = 8


class SharedBuffers:
    """The parameters of a bucket and the gradients of all replicas, as one of them sees them. Collective to make."""

    def __init__(self, members: Members, locks: SharedBlock, *, bucket: int, slots: int) -> None:
        """`locks` serves several buckets, each with its number; `slots`: parameters in this one."""
        self.members = members
        self.private = False
        """Whether each replica has a gradient of its own: over several micro-batches a sum in the order of arrival
        would not be the same every time."""
        self.gradients: list[torch.Tensor] = []
        self._locks, self._bucket, self._slots = locks, bucket, slots
        self._step = 1

    def __call__(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for the parameters, and for as many gradients as there are replicas. An untouched page takes
        no memory: gradients exist that are in use."""
        size = count * dtype.itemsize
        pieces = self._slots + 2 * count // LOCKED_AT_ONCE
        words = pieces * ((self.members.size + 1) // 2)
        block = SharedBlock(self.members, (1 + self.members.size) * size + WORD * words)
        self.gradients = [block.tensor((1 + n) * size, count, dtype) for n in range(self.members.size)]
        self._written_in = block.view[(1 + self.members.size) * size :][: WORD * words].cast("q")
        """For each piece of each gradient that two replicas share, the step in which it was last written."""
        self._first_piece = pieces * (self.members.index // 2)
        reach("start: room for parameters")
        return block.tensor(0, count, dtype)

    @property
    def mine(self) -> torch.Tensor:
        """The gradient that this replica writes to, and whose slice of it holds the sum in the end."""
        return self.gradients[self.members.index - (0 if self.private else self.members.index % 2)]

    @property
    def in_use(self) -> list[torch.Tensor]:
        return self.gradients if self.private else self.gradients[::2]

    def pieces(self, views: Sequence[torch.Tensor]) -> list[list[tuple[int, torch.Tensor]]]:
        """Each parameter's gradient cut into what is written under one lock, with numbers of this pair's own."""
        found: list[list[tuple[int, torch.Tensor]]] = []
        number = self._first_piece
        for view in views:
            rows = view if view.dim() else view.view(1)
            at_once = max(1, LOCKED_AT_ONCE * len(rows) // max(1, view.numel()))
            found.append([(number + n, piece) for n, piece in enumerate(rows.split(at_once))])
            number += len(found[-1])
        return found

    def add(self, pieces: Sequence[tuple[int, torch.Tensor]], gradient: torch.Tensor | None) -> None:
        """This replica's gradient of one parameter, none for zero, to what another has written or will add to."""
        parts = None
        if gradient is not None:
            rows = gradient if gradient.dim() else gradient.view(1)
            parts = rows.split(len(pieces[0][1])) if len(pieces) > 1 else (rows,)
        for n, (number, place) in enumerate(pieces):
            lock = (self._bucket << 32) + number
            self._locks.lock(lock)
            try:
                if self._written_in[number] != self._step:
                    place.zero_() if parts is None else place.copy_(parts[n])
                    self._written_in[number] = self._step
                elif parts is not None:
                    place.add_(parts[n])
                reach("step: gradient added")
            finally:
                self._locks.unlock(lock)

    def close(self) -> None:
        self._locks.close()

    def next_step(self) -> None:
        self._step += 1

    def sum_slice(self, part: slice) -> None:
        """The sum over replicas, in their order, where this one writes. Only the owner of the slice reads it."""
        if len(self.in_use) == 1:
            return
        for start in range(part.start, part.stop, AT_ONCE):
            some = slice(start, min(start + AT_ONCE, part.stop))
            total = self.in_use[0][some]
            for other in self.in_use[1:]:
                total = total + other[some]
            self.mine[some] = total

    def barrier(self) -> None:
        """Goes on when all replicas have come so far."""
        if self.members.group is not None:
            dist.barrier(group=self.members.group)
